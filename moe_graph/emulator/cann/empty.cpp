// Body of the libraries that only lend their name: see CMakeLists.txt.

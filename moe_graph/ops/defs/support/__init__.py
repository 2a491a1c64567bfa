"""What the kernels of several ops share."""

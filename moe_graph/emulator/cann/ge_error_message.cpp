// ge::GEGetErrorMsg, the one function whose callers use the old std::string. This file alone is
// compiled with _GLIBCXX_USE_CXX11_ABI=0, and takes the text through a C function for that reason.
#include <string>

#include "export.h"

extern "C" std::size_t moe_graph_cann_take_error(char* text, std::size_t capacity);

namespace ge {

CANN_API std::string GEGetErrorMsg() {
  constexpr std::size_t kLongest = std::size_t{1} << 16;
  std::string text(kLongest, '\0');
  text.resize(moe_graph_cann_take_error(&text[0], text.size()));
  return text;
}

}  // namespace ge

// The parts of the profiling interface whose result is used; see acl_settings.cpp for the others.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "export.h"

extern "C" {

CANN_API std::uint64_t MsprofGetHashId(const char* text, std::size_t length) {
  return std::hash<std::string_view>{}(std::string_view(text, length));
}

CANN_API std::uint64_t MsprofSysCycleTime() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // extern "C"

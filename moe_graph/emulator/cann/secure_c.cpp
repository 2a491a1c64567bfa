// Bounded string functions and profiling clocks that CANN's runtime library brings along.
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string_view>

#include "export.h"

namespace {

int print_bounded(char* target, std::size_t capacity, std::size_t count, const char* format,
                  std::va_list arguments) {
  if (target == nullptr || capacity == 0) {
    return -1;
  }
  const std::size_t limit = count + 1 < capacity ? count + 1 : capacity;
  const int written = std::vsnprintf(target, limit, format, arguments);
  return written >= 0 && static_cast<std::size_t>(written) < limit ? written : -1;
}

}  // namespace

extern "C" {

CANN_API int strcpy_s(char* target, std::size_t capacity, const char* source) {
  if (target == nullptr || source == nullptr || std::strlen(source) + 1 > capacity) {
    return 22;  // EINVAL
  }
  std::strcpy(target, source);
  return 0;
}

CANN_API int vsnprintf_s(char* target, std::size_t capacity, std::size_t count, const char* format,
                         std::va_list arguments) {
  return print_bounded(target, capacity, count, format, arguments);
}

CANN_API int snprintf_s(char* target, std::size_t capacity, std::size_t count, const char* format,
                        ...) {
  std::va_list arguments;
  va_start(arguments, format);
  const int written = print_bounded(target, capacity, count, format, arguments);
  va_end(arguments);
  return written;
}

CANN_API std::uint64_t MsprofGetHashId(const char* text, std::size_t length) {
  return std::hash<std::string_view>{}(std::string_view(text, length));
}

CANN_API std::uint64_t MsprofSysCycleTime() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // extern "C"

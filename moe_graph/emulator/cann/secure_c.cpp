// Bounded string functions that CANN's runtime library brings along.
#include <cstdarg>
#include <cstdio>
#include <cstring>

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

}  // extern "C"

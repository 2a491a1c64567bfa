#include "error.h"

#include <mutex>
#include <utility>

#include "export.h"

namespace cann {
namespace {

std::mutex latest_mutex;
std::string latest_message;

std::string& own_message() {
  thread_local std::string message;
  return message;
}

}  // namespace

void set_error(std::string message) {
  own_message() = message;
  const std::lock_guard<std::mutex> lock(latest_mutex);
  latest_message = std::move(message);
}

std::string take_error() {
  std::string message = std::exchange(own_message(), std::string());
  const std::lock_guard<std::mutex> lock(latest_mutex);
  if (message.empty()) {
    return std::exchange(latest_message, std::string());
  }
  if (latest_message == message) {
    latest_message.clear();
  }
  return message;
}

const char* peek_error() { return own_message().c_str(); }

int fail(const char* function, int code, const std::string& message) {
  set_error(std::string(function) + ": " + message);
  return code;
}

}  // namespace cann

// Copies the message that take_error() returns, cut at `capacity`; returns its length.
extern "C" CANN_API std::size_t moe_graph_cann_take_error(char* text, std::size_t capacity) {
  const std::string message = cann::take_error();
  return message.copy(text, capacity);
}

// The text of the last failure, as CANN keeps it: written by whoever fails, read once by the
// caller.
#pragma once

#include <string>

namespace cann {

// Remembers `message` for this thread, and as the latest of the process.
void set_error(std::string message);

// Returns and clears the last message of this thread. TorchAir compiles in a helper thread and asks
// for the message in the calling one, so a thread without a message gets the latest of the process.
std::string take_error();

// Returns the last message of this thread without clearing it; the pointer lives until the thread's
// next failure.
const char* peek_error();

// Error numbers of the acl interface that torch_npu tells apart.
enum AclError : int {
  kAclSuccess = 0,
  kAclInvalidParam = 100000,
  kAclInvalidDevice = 107001,
  kAclNoContext = 107002,
  kAclNotSupported = 207000,
  kAclOutOfMemory = 207001,
};

// Records "<function>: <message>" and returns `code`.
int fail(const char* function, int code, const std::string& message);

}  // namespace cann

// acl functions for memory: allocation, copies, fills.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "acl_state.h"
#include "device_memory.h"
#include "error.h"
#include "export.h"

using cann::fail;

namespace {

int allocate(const char* function, void** pointer, std::size_t size) {
  if (pointer == nullptr) {
    return fail(function, cann::kAclInvalidParam, "the output pointer is null");
  }
  *pointer = cann::allocate_device(cann::current_device(), size);
  if (*pointer != nullptr) {
    return cann::kAclSuccess;
  }
  return fail(function, cann::kAclOutOfMemory,
              "cannot allocate " + std::to_string(size) + " bytes on the emulated device " +
                  std::to_string(cann::current_device()) + ": " +
                  std::to_string(cann::device_used(cann::current_device())) + " of " +
                  std::to_string(cann::device_capacity()) + " bytes are in use");
}

int allocate_host(const char* function, void** pointer, std::size_t size) {
  if (pointer == nullptr) {
    return fail(function, cann::kAclInvalidParam, "the output pointer is null");
  }
  if (posix_memalign(pointer, cann::kDeviceAlignment, std::max<std::size_t>(size, 1)) != 0) {
    return fail(function, cann::kAclOutOfMemory,
                "cannot allocate " + std::to_string(size) + " bytes of host memory");
  }
  return cann::kAclSuccess;
}

// Checks that `count` bytes at `pointer` stay within `limit` and within the device block.
int check_extent(const char* function, const char* side, const void* pointer, std::size_t count,
                 std::size_t limit) {
  if (pointer == nullptr) {
    return fail(function, cann::kAclInvalidParam, std::string(side) + " is null");
  }
  const std::size_t available = std::min(limit, cann::bytes_available(pointer));
  if (count > available) {
    return fail(function, cann::kAclInvalidParam,
                std::string(side) + " has " + std::to_string(available) +
                    " bytes, got a request for " + std::to_string(count));
  }
  return cann::kAclSuccess;
}

int copy(const char* function, void* target, std::size_t limit, const void* source,
         std::size_t count) {
  if (count == 0) {
    return cann::kAclSuccess;
  }
  if (const int status = check_extent(function, "the destination", target, count, limit)) {
    return status;
  }
  if (const int status = check_extent(function, "the source", source, count, SIZE_MAX)) {
    return status;
  }
  std::memmove(target, source, count);
  return cann::kAclSuccess;
}

int fill(const char* function, void* target, std::size_t limit, int value, std::size_t count) {
  if (count == 0) {
    return cann::kAclSuccess;
  }
  if (const int status = check_extent(function, "the destination", target, count, limit)) {
    return status;
  }
  std::memset(target, value, count);
  return cann::kAclSuccess;
}

struct PointerAttributes {
  std::uint32_t device;
  std::uint32_t kind;  // 0 host, 1 device, 2 unregistered
  std::uint32_t page_size;
  std::uint32_t reserved[4];
};

}  // namespace

extern "C" {

CANN_API int aclrtMalloc(void** pointer, std::size_t size, int /*policy*/) {
  return allocate("aclrtMalloc", pointer, size);
}

CANN_API int aclrtMallocAlign32(void** pointer, std::size_t size, int /*policy*/) {
  return allocate("aclrtMallocAlign32", pointer, size);
}

CANN_API int aclrtFree(void* pointer) {
  if (!cann::free_device(pointer)) {
    return fail("aclrtFree", cann::kAclInvalidParam,
                "the pointer is not a live device allocation (freed twice?)");
  }
  return cann::kAclSuccess;
}

CANN_API int aclrtMallocHost(void** pointer, std::size_t size) {
  return allocate_host("aclrtMallocHost", pointer, size);
}

CANN_API int aclrtMallocHostWithCfg(void** pointer, std::uint64_t size, void* /*config*/) {
  return allocate_host("aclrtMallocHostWithCfg", pointer, size);
}

CANN_API int aclrtFreeHost(void* pointer) {
  std::free(pointer);
  return cann::kAclSuccess;
}

CANN_API int aclrtMemcpy(void* target, std::size_t limit, const void* source, std::size_t count,
                         int /*kind*/) {
  return copy("aclrtMemcpy", target, limit, source, count);
}

CANN_API int aclrtMemcpyAsync(void* target, std::size_t limit, const void* source,
                              std::size_t count, int /*kind*/, void* /*stream*/) {
  return copy("aclrtMemcpyAsync", target, limit, source, count);
}

CANN_API int aclrtMemset(void* target, std::size_t limit, std::int32_t value, std::size_t count) {
  return fill("aclrtMemset", target, limit, value, count);
}

CANN_API int aclrtMemsetAsync(void* target, std::size_t limit, std::int32_t value,
                              std::size_t count, void* /*stream*/) {
  return fill("aclrtMemsetAsync", target, limit, value, count);
}

CANN_API int aclrtGetMemInfo(int /*attribute*/, std::size_t* free, std::size_t* total) {
  *total = cann::device_capacity();
  *free = *total - std::min(*total, cann::device_used(cann::current_device()));
  return cann::kAclSuccess;
}

CANN_API int aclrtPointerGetAttributes(const void* pointer, PointerAttributes* attributes) {
  const bool on_device = cann::is_device_pointer(pointer);
  *attributes = PointerAttributes{};
  attributes->device = static_cast<std::uint32_t>(cann::current_device());
  attributes->kind = on_device ? 1 : 2;
  return cann::kAclSuccess;
}

}  // extern "C"

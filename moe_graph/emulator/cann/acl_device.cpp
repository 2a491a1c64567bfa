// acl functions for start-up, devices and contexts.
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "acl_state.h"
#include "error.h"
#include "export.h"

using cann::fail;

namespace cann {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kNoDevice = -1;

std::string& configured_soc() {
  static std::string name = "Ascend910B3";
  return name;
}

int configured_devices = 1;
thread_local int thread_device = kNoDevice;

// Stands for a context: its address is the handle, its position is the device.
char contexts[kMaxDevices];

int check_device(const char* function, int device) {
  if (device >= 0 && device < configured_devices) {
    return kAclSuccess;
  }
  return fail(function, kAclInvalidDevice,
              "device " + std::to_string(device) + " does not exist: got MOE_GRAPH_DEVICES=" +
                  std::to_string(configured_devices) + ", want an index below it");
}

int check_context(const char* function) {
  if (thread_device != kNoDevice) {
    return kAclSuccess;
  }
  return fail(function, kAclNoContext, "this thread has set no device");
}

}  // namespace

void configure(const char* soc_name, int device_count) {
  configured_soc() = soc_name;
  configured_devices = device_count;
}

const char* soc_name() { return configured_soc().c_str(); }
int device_count() { return configured_devices; }
int current_device() { return thread_device == kNoDevice ? 0 : thread_device; }

bool set_current_device(int device) {
  if (device < 0 || device >= configured_devices) {
    return false;
  }
  thread_device = device;
  return true;
}

}  // namespace cann

extern "C" {

CANN_API int aclInit(const char* /*config*/) { return cann::kAclSuccess; }
CANN_API int aclFinalize() { return cann::kAclSuccess; }
CANN_API const char* aclrtGetSocName() { return cann::soc_name(); }
CANN_API const char* aclGetRecentErrMsg() { return cann::peek_error(); }

CANN_API int aclsysGetVersionStr(char* /*package*/, char* version) {
  std::strcpy(version, "emulated");
  return cann::kAclSuccess;
}

CANN_API int aclrtGetDeviceCount(std::uint32_t* count) {
  *count = static_cast<std::uint32_t>(cann::device_count());
  return cann::kAclSuccess;
}

CANN_API int aclrtSetDevice(std::int32_t device) {
  if (const int status = cann::check_device("aclrtSetDevice", device)) {
    return status;
  }
  cann::set_current_device(device);
  return cann::kAclSuccess;
}

CANN_API int aclrtResetDevice(std::int32_t device) {
  return cann::check_device("aclrtResetDevice", device);
}

// A thread has neither device nor context before it sets one. torch_npu counts on being told: it
// then sets device 0 itself, and remembers the context.
CANN_API int aclrtGetDevice(std::int32_t* device) {
  *device = cann::current_device();
  return cann::check_context("aclrtGetDevice");
}

CANN_API int aclrtGetCurrentContext(void** context) {
  if (const int status = cann::check_context("aclrtGetCurrentContext")) {
    *context = nullptr;
    return status;
  }
  *context = &cann::contexts[cann::current_device()];
  return cann::kAclSuccess;
}

CANN_API int aclrtSetCurrentContext(void* context) {
  if (context == nullptr) {
    return fail("aclrtSetCurrentContext", cann::kAclInvalidParam, "the context is null");
  }
  const auto offset = static_cast<char*>(context) - cann::contexts;
  if (const int status =
          cann::check_device("aclrtSetCurrentContext", static_cast<std::int32_t>(offset))) {
    return status;
  }
  cann::set_current_device(static_cast<int>(offset));
  return cann::kAclSuccess;
}

CANN_API int aclrtGetPrimaryCtxState(std::int32_t device, std::uint32_t* flags,
                                     std::int32_t* active) {
  *flags = 0;
  *active = 1;
  return cann::check_device("aclrtGetPrimaryCtxState", device);
}

CANN_API int aclrtGetLogicDevIdByUserDevId(std::int32_t user_device, std::int32_t* logic_device) {
  *logic_device = user_device;
  return cann::check_device("aclrtGetLogicDevIdByUserDevId", user_device);
}

CANN_API int aclrtDeviceGetBareTgid(std::int32_t* process) {
  *process = static_cast<std::int32_t>(getpid());
  return cann::kAclSuccess;
}

CANN_API int aclrtDeviceCanAccessPeer(std::int32_t* can_access, std::int32_t device,
                                      std::int32_t peer) {
  *can_access = device != peer;
  return cann::kAclSuccess;
}

CANN_API int aclrtDeviceEnablePeerAccess(std::int32_t peer, std::uint32_t /*flags*/) {
  return cann::check_device("aclrtDeviceEnablePeerAccess", peer);
}

// The numbers of an Ascend 910B3, only ever shown as device properties.
CANN_API int aclGetDeviceCapability(std::uint32_t device, int attribute, std::int64_t* value) {
  constexpr std::int64_t kCubeCores = 20;
  constexpr std::int64_t kVectorCores = 40;
  constexpr std::int64_t kL2Bytes = std::int64_t{192} << 20;
  switch (attribute) {
    case 0:
      *value = kCubeCores;
      break;
    case 1:
      *value = kVectorCores;
      break;
    case 2:
      *value = kL2Bytes;
      break;
    default:
      return fail("aclGetDeviceCapability", cann::kAclInvalidParam,
                  "unknown attribute " + std::to_string(attribute));
  }
  return cann::check_device("aclGetDeviceCapability", static_cast<std::int32_t>(device));
}

CANN_API int aclrtGetSysParamOpt(int /*option*/, std::int64_t* value) {
  *value = 0;
  return cann::kAclSuccess;
}

}  // extern "C"

// Functions that torch_npu is linked against and that this emulation cannot honour. Each fails and
// says so; none pretends to have worked.
#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"
#include "export.h"

#define UNSUPPORTED(name, what)                                                                 \
  extern "C" CANN_API int name() {                                                              \
    return cann::fail(#name, cann::kAclNotSupported,                                            \
                      what " is not emulated: run this on a machine with CANN, or without it"); \
  }                                                                                             \
  static_assert(true, "a semicolon follows")

UNSUPPORTED(aclrtBinaryGetFunction, "loading a device binary");
UNSUPPORTED(aclrtBinaryLoadFromData, "loading a device binary");
UNSUPPORTED(aclrtGetFunctionAddr, "loading a device binary");
UNSUPPORTED(rtDevBinaryRegister, "loading a device binary");
UNSUPPORTED(rtFunctionRegister, "loading a device binary");
UNSUPPORTED(rtGetC2cCtrlAddr, "launching a device binary");
UNSUPPORTED(rtKernelLaunch, "launching a device binary");
UNSUPPORTED(aclrtMallocPhysical, "virtual device memory (expandable_segments)");
UNSUPPORTED(aclrtFreePhysical, "virtual device memory (expandable_segments)");
UNSUPPORTED(aclrtReserveMemAddress, "virtual device memory (expandable_segments)");
UNSUPPORTED(aclrtReleaseMemAddress, "virtual device memory (expandable_segments)");
UNSUPPORTED(aclrtMapMem, "virtual device memory (expandable_segments)");
UNSUPPORTED(aclrtUnmapMem, "virtual device memory (expandable_segments)");
UNSUPPORTED(aclrtMemExportToShareableHandle, "sharing device memory between processes");
UNSUPPORTED(aclrtMemImportFromShareableHandle, "sharing device memory between processes");
UNSUPPORTED(aclrtMemSetPidToShareableHandle, "sharing device memory between processes");
UNSUPPORTED(acltdtDestroyChannel, "the channel that prints from the device");
UNSUPPORTED(acltdtDestroyDataset, "the channel that prints from the device");
UNSUPPORTED(acltdtGetDimsFromItem, "the channel that prints from the device");
UNSUPPORTED(acltdtReceiveTensor, "the channel that prints from the device");

extern "C" {

// The channel is never created, so no data set or item exists that these could be asked about.
CANN_API void* acltdtCreateChannelWithCapacity(std::uint32_t, const char*, std::size_t) {
  return nullptr;
}
CANN_API void* acltdtCreateDataset() { return nullptr; }
CANN_API void* acltdtGetDataItem(const void*, std::size_t) { return nullptr; }
CANN_API void* acltdtGetDataAddrFromItem(const void*) { return nullptr; }
CANN_API std::size_t acltdtGetDataSizeFromItem(const void*) { return 0; }
CANN_API std::size_t acltdtGetDatasetSize(const void*) { return 0; }
CANN_API std::size_t acltdtGetDimNumFromItem(const void*) { return 0; }
CANN_API int acltdtGetDataTypeFromItem(const void*) { return -1; }

// torch_npu's older kernels end here. The Python kernels of the emulation replace them, so only an
// operator without one gets this far.
CANN_API int aclopCompileAndExecute(const char* op_type) {
  return cann::fail("aclopCompileAndExecute", cann::kAclNotSupported,
                    std::string("operator ") + op_type +
                        " has no kernel on the emulated NPU: move its inputs to the CPU");
}

}  // extern "C"

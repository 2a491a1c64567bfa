// Descriptions that torch_npu builds before it launches a single operator, and compile options.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"
#include "export.h"

using cann::fail;

namespace {

struct TensorDescription {
  int dtype;
  int format;
  std::vector<std::int64_t> dims;
};

struct DataBuffer {
  void* data;
  std::size_t size;
};

struct OperatorAttributes {};

}  // namespace

extern "C" {

CANN_API TensorDescription* aclCreateTensorDesc(int dtype, int rank, const std::int64_t* dims,
                                                int format) {
  return new TensorDescription{dtype, format, std::vector<std::int64_t>(dims, dims + rank)};
}

CANN_API void aclDestroyTensorDesc(const TensorDescription* description) { delete description; }
CANN_API int aclGetTensorDescType(const TensorDescription* description) {
  return description->dtype;
}
CANN_API int aclGetTensorDescFormat(const TensorDescription* description) {
  return description->format;
}
CANN_API std::size_t aclGetTensorDescNumDims(const TensorDescription* description) {
  return description->dims.size();
}

CANN_API int aclGetTensorDescDimV2(const TensorDescription* description, std::size_t index,
                                   std::int64_t* dim) {
  if (index >= description->dims.size()) {
    return fail("aclGetTensorDescDimV2", cann::kAclInvalidParam,
                "dimension " + std::to_string(index) + " of a tensor of rank " +
                    std::to_string(description->dims.size()));
  }
  *dim = description->dims[index];
  return cann::kAclSuccess;
}

CANN_API void aclSetTensorDescName(TensorDescription*, const char*) {}
CANN_API int aclSetTensorFormat(TensorDescription*, int) { return cann::kAclSuccess; }
CANN_API int aclSetTensorPlaceMent(TensorDescription*, int) { return cann::kAclSuccess; }
CANN_API int aclSetTensorShape(TensorDescription*, int, const std::int64_t*) {
  return cann::kAclSuccess;
}

CANN_API DataBuffer* aclCreateDataBuffer(void* data, std::size_t size) {
  return new DataBuffer{data, size};
}
CANN_API int aclDestroyDataBuffer(const DataBuffer* buffer) {
  delete buffer;
  return cann::kAclSuccess;
}

CANN_API OperatorAttributes* aclopCreateAttr() { return new OperatorAttributes; }
CANN_API void aclopDestroyAttr(const OperatorAttributes* attributes) { delete attributes; }

// Every compile option reads as an empty string.
CANN_API std::size_t aclGetCompileoptSize(int /*option*/) { return 1; }
CANN_API int aclGetCompileopt(int /*option*/, char* value, std::size_t length) {
  if (length > 0) {
    value[0] = '\0';
  }
  return cann::kAclSuccess;
}

}  // extern "C"

// The GE classes that TorchAir passes by value. Each holds one shared pointer, as its callers
// assume; what is behind the pointer is this library's own business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "export.h"

namespace ge {

using Status = std::uint32_t;
constexpr Status kSuccess = 0;
constexpr Status kFailed = 0xFFFFFFFF;

// Values of ge::DataType, ge::Format and ge::Placement; only the ones used here have names.
enum DataType : int { DT_FLOAT = 0, DT_UNDEFINED = 28 };
enum Format : int { FORMAT_NCHW = 0, FORMAT_NHWC = 1, FORMAT_ND = 2, FORMAT_FRACTAL_NZ = 29 };
enum Placement : int { kPlacementHost = 0, kPlacementDevice = 1 };

class CANN_API AscendString {
 public:
  AscendString() = default;
  AscendString(const char* text);
  const char* GetString() const;
  bool operator<(const AscendString& other) const;
  bool operator==(const AscendString& other) const;

 private:
  std::shared_ptr<std::string> text_;
};

using Options = std::map<AscendString, AscendString>;

struct ShapeImpl {
  std::vector<std::int64_t> dims;
};

class CANN_API Shape {
 public:
  explicit Shape(const std::vector<std::int64_t>& dims);
  std::vector<std::int64_t> GetDims() const;

 private:
  std::shared_ptr<ShapeImpl> impl_;
};

struct TensorDescImpl {
  std::vector<std::int64_t> dims;
  std::vector<std::int64_t> origin_dims;
  Format format = FORMAT_ND;
  Format origin_format = FORMAT_ND;
  DataType dtype = DT_FLOAT;
  Placement placement = kPlacementHost;
};

class CANN_API TensorDesc {
 public:
  TensorDesc();
  Shape GetShape() const;
  void SetOriginShape(const Shape& shape);
  Format GetFormat() const;
  void SetFormat(Format format);
  void SetOriginFormat(Format format);
  DataType GetDataType() const;
  void SetDataType(DataType dtype);
  Placement GetPlacement() const;
  void SetPlacement(Placement placement);

 private:
  friend class Tensor;
  std::shared_ptr<TensorDescImpl> impl_;
};

struct TensorImpl;

class CANN_API Tensor {
 public:
  using Deleter = std::function<void(std::uint8_t*)>;

  Tensor();
  TensorDesc GetTensorDesc() const;
  Status SetTensorDesc(const TensorDesc& description);

  const std::uint8_t* GetData() const;
  std::uint8_t* GetData();
  std::size_t GetSize() const;
  Status SetData(std::uint8_t* data, std::size_t size, const Deleter& deleter);
  Status ResetData(std::uint8_t* data, std::size_t size, const Deleter& deleter);
  std::unique_ptr<std::uint8_t[], Deleter> ResetData();

  Status SetShapeDimNum(std::size_t rank);
  std::size_t GetShapeDimNum() const;
  Status SetShapeDim(std::size_t index, std::int64_t dim);
  std::int64_t GetShapeDim(std::size_t index) const;
  Status SetOriginShapeDimNum(std::size_t rank);
  std::size_t GetOriginShapeDimNum() const;
  Status SetOriginShapeDim(std::size_t index, std::int64_t dim);

  Status SetFormat(const Format& format);
  Format GetFormat() const;
  Status SetDataType(const DataType& dtype);
  DataType GetDataType() const;
  Status SetPlacement(const Placement& placement);
  Placement GetPlacement() const;

 private:
  std::shared_ptr<TensorImpl> impl_;
};

struct GNodeImpl;

class CANN_API GNode {
 public:
  Status GetType(AscendString& type) const;

 private:
  std::shared_ptr<GNodeImpl> impl_;
};

struct GraphImpl {
  std::string name;
  std::string model;  // a serialised ge.proto.ModelDef
};

class CANN_API Graph {
 public:
  explicit Graph(const char* name);
  Status LoadFromSerializedModelArray(const void* model, std::size_t size);
  Status CopyFrom(const Graph& other);
  Status SaveToFile(const char* path) const;
  std::vector<GNode> GetAllNodes() const;
  const std::string& serialised() const;

 private:
  // Null in a graph that its caller has only declared.
  std::shared_ptr<GraphImpl> impl_;
};

CANN_API const char* GetFormatName(Format format);

}  // namespace ge

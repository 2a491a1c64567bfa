// AscendString, Shape, TensorDesc and Tensor: plain holders of what TorchAir puts in.
#include <string_view>
#include <utility>

#include "ge_types.h"

namespace ge {

AscendString::AscendString(const char* text)
    : text_(std::make_shared<std::string>(text == nullptr ? "" : text)) {}

const char* AscendString::GetString() const { return text_ ? text_->c_str() : ""; }

bool AscendString::operator<(const AscendString& other) const {
  return std::string_view(GetString()) < std::string_view(other.GetString());
}

bool AscendString::operator==(const AscendString& other) const {
  return std::string_view(GetString()) == std::string_view(other.GetString());
}

Shape::Shape(const std::vector<std::int64_t>& dims)
    : impl_(std::make_shared<ShapeImpl>(ShapeImpl{dims})) {}

std::vector<std::int64_t> Shape::GetDims() const { return impl_->dims; }

TensorDesc::TensorDesc() : impl_(std::make_shared<TensorDescImpl>()) {}

Shape TensorDesc::GetShape() const { return Shape(impl_->dims); }
void TensorDesc::SetOriginShape(const Shape& shape) { impl_->origin_dims = shape.GetDims(); }
Format TensorDesc::GetFormat() const { return impl_->format; }
void TensorDesc::SetFormat(Format format) { impl_->format = format; }
void TensorDesc::SetOriginFormat(Format format) { impl_->origin_format = format; }
DataType TensorDesc::GetDataType() const { return impl_->dtype; }
void TensorDesc::SetDataType(DataType dtype) { impl_->dtype = dtype; }
Placement TensorDesc::GetPlacement() const { return impl_->placement; }
void TensorDesc::SetPlacement(Placement placement) { impl_->placement = placement; }

// Tensors that are copies of each other share one of these, data and description alike.
struct TensorImpl {
  TensorDescImpl description;
  std::uint8_t* data = nullptr;
  std::size_t size = 0;
  Tensor::Deleter deleter;

  TensorImpl() = default;
  TensorImpl(const TensorImpl&) = delete;
  TensorImpl& operator=(const TensorImpl&) = delete;
  ~TensorImpl() { release(); }

  void release() {
    if (data != nullptr && deleter) {
      deleter(data);
    }
    data = nullptr;
    size = 0;
    deleter = nullptr;
  }
};

Tensor::Tensor() : impl_(std::make_shared<TensorImpl>()) {}

TensorDesc Tensor::GetTensorDesc() const {
  TensorDesc copy;
  *copy.impl_ = impl_->description;
  return copy;
}

Status Tensor::SetTensorDesc(const TensorDesc& description) {
  impl_->description = *description.impl_;
  return kSuccess;
}

const std::uint8_t* Tensor::GetData() const { return impl_->data; }
std::uint8_t* Tensor::GetData() { return impl_->data; }
std::size_t Tensor::GetSize() const { return impl_->size; }

Status Tensor::SetData(std::uint8_t* data, std::size_t size, const Deleter& deleter) {
  return ResetData(data, size, deleter);
}

Status Tensor::ResetData(std::uint8_t* data, std::size_t size, const Deleter& deleter) {
  impl_->release();
  impl_->data = data;
  impl_->size = size;
  impl_->deleter = deleter;
  return kSuccess;
}

std::unique_ptr<std::uint8_t[], Tensor::Deleter> Tensor::ResetData() {
  Deleter deleter = impl_->deleter ? std::move(impl_->deleter) : Deleter([](std::uint8_t*) {});
  impl_->deleter = nullptr;
  impl_->size = 0;
  return {std::exchange(impl_->data, nullptr), std::move(deleter)};
}

Status Tensor::SetShapeDimNum(std::size_t rank) {
  impl_->description.dims.resize(rank);
  return kSuccess;
}

std::size_t Tensor::GetShapeDimNum() const { return impl_->description.dims.size(); }

Status Tensor::SetShapeDim(std::size_t index, std::int64_t dim) {
  if (index >= impl_->description.dims.size()) {
    return kFailed;
  }
  impl_->description.dims[index] = dim;
  return kSuccess;
}

std::int64_t Tensor::GetShapeDim(std::size_t index) const {
  return index < impl_->description.dims.size() ? impl_->description.dims[index] : 0;
}

Status Tensor::SetOriginShapeDimNum(std::size_t rank) {
  impl_->description.origin_dims.resize(rank);
  return kSuccess;
}

std::size_t Tensor::GetOriginShapeDimNum() const { return impl_->description.origin_dims.size(); }

Status Tensor::SetOriginShapeDim(std::size_t index, std::int64_t dim) {
  if (index >= impl_->description.origin_dims.size()) {
    return kFailed;
  }
  impl_->description.origin_dims[index] = dim;
  return kSuccess;
}

Status Tensor::SetFormat(const Format& format) {
  impl_->description.format = format;
  return kSuccess;
}

Format Tensor::GetFormat() const { return impl_->description.format; }

Status Tensor::SetDataType(const DataType& dtype) {
  impl_->description.dtype = dtype;
  return kSuccess;
}

DataType Tensor::GetDataType() const { return impl_->description.dtype; }

Status Tensor::SetPlacement(const Placement& placement) {
  impl_->description.placement = placement;
  return kSuccess;
}

Placement Tensor::GetPlacement() const { return impl_->description.placement; }

}  // namespace ge

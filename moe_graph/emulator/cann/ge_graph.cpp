// Graph: keeps the serialised model, which only the Python engine reads.
#include <fstream>

#include "error.h"
#include "ge_types.h"

namespace ge {

struct GNodeImpl {
  std::string type;
};

Status GNode::GetType(AscendString& type) const {
  if (impl_ == nullptr) {
    return kFailed;
  }
  type = AscendString(impl_->type.c_str());
  return kSuccess;
}

Graph::Graph(const char* name) : impl_(std::make_shared<GraphImpl>()) {
  impl_->name = name == nullptr ? "" : name;
}

Status Graph::LoadFromSerializedModelArray(const void* model, std::size_t size) {
  if (model == nullptr || size == 0) {
    cann::set_error("Graph::LoadFromSerializedModelArray: the model is empty");
    return kFailed;
  }
  impl_ = std::make_shared<GraphImpl>(
      GraphImpl{impl_ ? impl_->name : "", std::string(static_cast<const char*>(model), size)});
  return kSuccess;
}

Status Graph::CopyFrom(const Graph& other) {
  impl_ = std::make_shared<GraphImpl>(other.impl_ ? *other.impl_ : GraphImpl{});
  return kSuccess;
}

const std::string& Graph::serialised() const {
  static const std::string empty;
  return impl_ ? impl_->model : empty;
}

Status Graph::SaveToFile(const char* path) const {
  std::ofstream file(path, std::ios::binary);
  file.write(serialised().data(), static_cast<std::streamsize>(serialised().size()));
  file.close();
  if (!file) {
    cann::set_error(std::string("Graph::SaveToFile: cannot write ") + path);
    return kFailed;
  }
  return kSuccess;
}

// TorchAir looks for PrintV2 nodes here, to open the channel that prints from the device. There is
// no such channel, so it is shown no node.
std::vector<GNode> Graph::GetAllNodes() const { return {}; }

const char* GetFormatName(Format format) {
  switch (format) {
    case FORMAT_NCHW:
      return "NCHW";
    case FORMAT_NHWC:
      return "NHWC";
    case FORMAT_ND:
      return "ND";
    case FORMAT_FRACTAL_NZ:
      return "FRACTAL_NZ";
  }
  return "RESERVED";
}

}  // namespace ge

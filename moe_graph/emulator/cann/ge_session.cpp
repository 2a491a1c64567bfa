// ge::Session and CompiledGraphSummary: hand graphs and tensors to the Python engine.
#include <atomic>
#include <mutex>
#include <utility>

#include "engine.h"
#include "error.h"
#include "ge_types.h"

namespace ge {
namespace {

struct OutputSpec {
  std::vector<std::int64_t> dims;
  DataType dtype = DT_FLOAT;
};

// A record as engine.h describes it.
struct Record {
  std::uint8_t* data;
  std::size_t bytes;
  DataType dtype;
  std::int64_t token;
  std::vector<std::int64_t> dims;
};

std::vector<Record> unpack(const std::int64_t* words, std::size_t count) {
  std::vector<Record> records;
  for (std::size_t at = 0; at + cann::kRecordHead <= count;) {
    const std::int64_t* const head = words + at;
    const auto rank = static_cast<std::size_t>(head[4]);
    const std::int64_t* const dims = head + cann::kRecordHead;
    records.push_back(Record{reinterpret_cast<std::uint8_t*>(head[0]),
                             static_cast<std::size_t>(head[1]), static_cast<DataType>(head[2]),
                             head[3], std::vector<std::int64_t>(dims, dims + rank)});
    at += cann::kRecordHead + rank;
  }
  return records;
}

std::vector<std::int64_t> pack(const std::vector<Tensor>& tensors) {
  std::vector<std::int64_t> words;
  words.reserve(tensors.size() * (cann::kRecordHead + 4));
  for (const Tensor& tensor : tensors) {
    const std::size_t rank = tensor.GetShapeDimNum();
    words.push_back(reinterpret_cast<std::int64_t>(tensor.GetData()));
    words.push_back(static_cast<std::int64_t>(tensor.GetSize()));
    words.push_back(tensor.GetDataType());
    words.push_back(tensor.GetPlacement());
    words.push_back(static_cast<std::int64_t>(rank));
    for (std::size_t i = 0; i < rank; ++i) {
      words.push_back(tensor.GetShapeDim(i));
    }
  }
  return words;
}

// The memory belongs to the engine until the tensor that got it lets go.
void release_output(std::int64_t token) {
  if (const cann::EngineCallbacks* const engine = cann::engine()) {
    engine->release(token);
  }
}

Status status_of(int failed) { return failed == 0 ? kSuccess : kFailed; }

Options& global_options() {
  static Options options;
  return options;
}

}  // namespace

class CANN_API CompiledGraphSummary {
 public:
  bool IsStatic() const;
  Status GetOutputShapes(std::vector<Shape>& shapes) const;
  Status GetOutputDtypes(std::vector<DataType>& dtypes) const;
  Status GetConstMemorySize(std::size_t& size) const;
  Status GetFeatureMemorySize(std::size_t& size) const;
  Status GetFixedFeatureMemorySize(std::size_t& size) const;
  Status GetFeatureMemoryBaseRefreshable(bool& refreshable) const;

  bool is_static = false;
  std::vector<OutputSpec> outputs;
};

bool CompiledGraphSummary::IsStatic() const { return is_static; }

Status CompiledGraphSummary::GetOutputShapes(std::vector<Shape>& shapes) const {
  shapes.clear();
  for (const OutputSpec& output : outputs) {
    shapes.emplace_back(output.dims);
  }
  return kSuccess;
}

Status CompiledGraphSummary::GetOutputDtypes(std::vector<DataType>& dtypes) const {
  dtypes.clear();
  for (const OutputSpec& output : outputs) {
    dtypes.push_back(output.dtype);
  }
  return kSuccess;
}

// The engine manages its own memory, so it wants none from TorchAir.
Status CompiledGraphSummary::GetConstMemorySize(std::size_t& size) const {
  size = 0;
  return kSuccess;
}

Status CompiledGraphSummary::GetFeatureMemorySize(std::size_t& size) const {
  size = 0;
  return kSuccess;
}

Status CompiledGraphSummary::GetFixedFeatureMemorySize(std::size_t& size) const {
  size = 0;
  return kSuccess;
}

Status CompiledGraphSummary::GetFeatureMemoryBaseRefreshable(bool& refreshable) const {
  refreshable = false;
  return kSuccess;
}

class Allocator;

class CANN_API Session {
 public:
  explicit Session(const Options& options);
  ~Session();
  Status AddGraph(std::uint32_t id, const Graph& graph, const Options& options);
  Status CompileGraph(std::uint32_t id);
  Status RemoveGraph(std::uint32_t id);
  std::shared_ptr<CompiledGraphSummary> GetCompiledGraphSummary(std::uint32_t id);
  Status RunGraph(std::uint32_t id, const std::vector<Tensor>& inputs,
                  std::vector<Tensor>& outputs);
  Status RunGraphWithStreamAsync(std::uint32_t id, void* stream, const std::vector<Tensor>& inputs,
                                 std::vector<Tensor>& outputs);
  Status SetGraphConstMemoryBase(std::uint32_t id, const void* memory, std::size_t size);
  Status UpdateGraphFeatureMemoryBase(std::uint32_t id, const void* memory, std::size_t size);
  Status SetGraphFixedFeatureMemoryBase(std::uint32_t id, const void* memory, std::size_t size);
  Status UpdateGraphRefreshableFeatureMemoryBase(std::uint32_t id, const void* memory,
                                                 std::size_t size);
  Status RegisterExternalAllocator(const void* stream, std::shared_ptr<Allocator> allocator) const;

 private:
  std::uint64_t id_;  // the only member that callers leave room for
};

namespace {

// Options of live sessions, since Session itself has no room for them. Never destroyed: TorchAir's
// session outlives static objects.
class SessionOptions {
 public:
  static SessionOptions& instance() {
    static auto* const options = new SessionOptions;
    return *options;
  }

  void set(std::uint64_t session, const Options& options) {
    const std::lock_guard<std::mutex> lock(mutex_);
    by_session_[session] = options;
  }

  Options get(std::uint64_t session) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return by_session_[session];
  }

  void erase(std::uint64_t session) {
    const std::lock_guard<std::mutex> lock(mutex_);
    by_session_.erase(session);
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, Options> by_session_;
};

}  // namespace

Session::Session(const Options& options) {
  static std::atomic<std::uint64_t> next_id{1};
  id_ = next_id++;
  SessionOptions::instance().set(id_, options);
}

Session::~Session() { SessionOptions::instance().erase(id_); }

Status Session::AddGraph(std::uint32_t id, const Graph& graph, const Options& options) {
  const cann::EngineCallbacks* const engine = cann::engine();
  if (engine == nullptr) {
    return kFailed;
  }
  Options merged = options;  // insert keeps what is there: graph, then session, then global
  const Options of_session = SessionOptions::instance().get(id_);
  merged.insert(of_session.begin(), of_session.end());
  merged.insert(global_options().begin(), global_options().end());
  std::vector<const char*> keys_and_values;
  for (const auto& [key, value] : merged) {
    keys_and_values.push_back(key.GetString());
    keys_and_values.push_back(value.GetString());
  }
  return status_of(engine->add_graph(id_, id, graph.serialised().data(), graph.serialised().size(),
                                     keys_and_values.data(), merged.size()));
}

// The engine compiles what it is given in AddGraph.
Status Session::CompileGraph(std::uint32_t) { return kSuccess; }

Status Session::RemoveGraph(std::uint32_t id) {
  const cann::EngineCallbacks* const engine = cann::engine();
  return engine == nullptr ? kFailed : status_of(engine->remove_graph(id_, id));
}

std::shared_ptr<CompiledGraphSummary> Session::GetCompiledGraphSummary(std::uint32_t id) {
  const cann::EngineCallbacks* const engine = cann::engine();
  auto summary = std::make_shared<CompiledGraphSummary>();
  if (engine == nullptr || engine->summary(id_, id, summary.get()) != 0) {
    return nullptr;
  }
  return summary;
}

Status Session::RunGraph(std::uint32_t id, const std::vector<Tensor>& inputs,
                         std::vector<Tensor>& outputs) {
  const cann::EngineCallbacks* const engine = cann::engine();
  if (engine == nullptr) {
    return kFailed;
  }
  const std::vector<std::int64_t> input_words = pack(inputs);
  const std::vector<std::int64_t> output_words = pack(outputs);
  return status_of(engine->run(id_, id, input_words.data(), input_words.size(), output_words.data(),
                               output_words.size(), &outputs));
}

Status Session::RunGraphWithStreamAsync(std::uint32_t id, void* /*stream*/,
                                        const std::vector<Tensor>& inputs,
                                        std::vector<Tensor>& outputs) {
  return RunGraph(id, inputs, outputs);
}

Status Session::SetGraphConstMemoryBase(std::uint32_t, const void*, std::size_t) {
  return kSuccess;
}

Status Session::UpdateGraphFeatureMemoryBase(std::uint32_t, const void*, std::size_t) {
  return kSuccess;
}

Status Session::SetGraphFixedFeatureMemoryBase(std::uint32_t, const void*, std::size_t) {
  return kSuccess;
}

Status Session::UpdateGraphRefreshableFeatureMemoryBase(std::uint32_t, const void*, std::size_t) {
  return kSuccess;
}

Status Session::RegisterExternalAllocator(const void*, std::shared_ptr<Allocator>) const {
  return kSuccess;
}

CANN_API Status GEInitialize(const Options& options) {
  global_options() = options;
  return kSuccess;
}

CANN_API Status GEFinalize() {
  global_options().clear();
  return kSuccess;
}

CANN_API AscendString GEGetWarningMsgV2() { return AscendString(""); }

}  // namespace ge

extern "C" {

void moe_graph_cann_emit_summary(void* sink, int is_static, const std::int64_t* outputs,
                                 std::size_t words) {
  auto* const summary = static_cast<ge::CompiledGraphSummary*>(sink);
  summary->is_static = is_static != 0;
  for (ge::Record& record : ge::unpack(outputs, words)) {
    summary->outputs.push_back(ge::OutputSpec{std::move(record.dims), record.dtype});
  }
}

void moe_graph_cann_emit_outputs(void* sink, const std::int64_t* outputs, std::size_t words) {
  auto& tensors = *static_cast<std::vector<ge::Tensor>*>(sink);
  const std::vector<ge::Record> records = ge::unpack(outputs, words);
  tensors.resize(records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    const ge::Record& record = records[i];
    ge::Tensor& tensor = tensors[i];
    tensor.SetDataType(record.dtype);
    tensor.SetPlacement(ge::kPlacementDevice);
    tensor.SetFormat(ge::FORMAT_ND);
    tensor.SetShapeDimNum(record.dims.size());
    tensor.SetOriginShapeDimNum(record.dims.size());
    for (std::size_t dim = 0; dim < record.dims.size(); ++dim) {
      tensor.SetShapeDim(dim, record.dims[dim]);
      tensor.SetOriginShapeDim(dim, record.dims[dim]);
    }
    if (record.token != cann::kNoToken) {
      tensor.ResetData(record.data, record.bytes,
                       [token = record.token](std::uint8_t*) { ge::release_output(token); });
    }
  }
}
}

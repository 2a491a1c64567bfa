// The seam to the Python engine: the functions that it registers, and those it calls to answer.
// bridge.py declares the same signatures for ctypes; tensors and shapes cross as flat int64
// records.
#pragma once

#include <cstddef>
#include <cstdint>

#include "export.h"

namespace cann {

// One tensor is kRecordHead numbers followed by its dims:
// {address, bytes, dtype (ge::DataType), placement or token, rank, dim...}.
constexpr std::size_t kRecordHead = 5;

// Token of an output that lies in memory of the caller already.
constexpr std::int64_t kNoToken = 0;

// Each returns 0, or non-zero after calling moe_graph_cann_set_error. `sink` goes back into the
// emit function that belongs to the call.
struct EngineCallbacks {
  int (*add_graph)(std::uint64_t session, std::uint32_t graph, const char* model,
                   std::size_t model_size, const char* const* keys_and_values,
                   std::size_t option_count);
  int (*summary)(std::uint64_t session, std::uint32_t graph, void* sink);
  int (*run)(std::uint64_t session, std::uint32_t graph, const std::int64_t* inputs,
             std::size_t input_words, const std::int64_t* outputs, std::size_t output_words,
             void* sink);
  int (*remove_graph)(std::uint64_t session, std::uint32_t graph);
  // Gives memory of a handed-over output back.
  void (*release)(std::int64_t token);
  // 0 known, 1 unknown (no error text), 2 failed.
  int (*ir_definition)(const char* op_type, void* sink);
};

// The registered callbacks, or nullptr (with the error text set) when none are: before the engine
// is registered, and once Python shuts down.
const EngineCallbacks* engine();

}  // namespace cann

extern "C" {

CANN_API void moe_graph_cann_configure(const char* soc_name, int device_count);
CANN_API void moe_graph_cann_register(const cann::EngineCallbacks* callbacks);
CANN_API void moe_graph_cann_unregister();
CANN_API void moe_graph_cann_set_error(const char* message);
CANN_API void moe_graph_cann_emit_summary(void* sink, int is_static, const std::int64_t* outputs,
                                          std::size_t words);
CANN_API void moe_graph_cann_emit_outputs(void* sink, const std::int64_t* outputs,
                                          std::size_t words);
// `kind` is 0 for an input, 1 for an output, 2 for an attribute.
CANN_API void moe_graph_cann_emit_ir(void* sink, int kind, const char* name, const char* type);
}

// Registration of the Python engine.
#include "engine.h"

#include <atomic>

#include "acl_state.h"
#include "error.h"

namespace cann {
namespace {

EngineCallbacks registered;
std::atomic<bool> is_registered{false};

}  // namespace

const EngineCallbacks* engine() {
  if (is_registered.load()) {
    return &registered;
  }
  set_error("the graph engine of the emulated CANN is not there: import moe_graph first");
  return nullptr;
}

}  // namespace cann

extern "C" {

void moe_graph_cann_configure(const char* soc_name, int device_count) {
  cann::configure(soc_name, device_count);
}

void moe_graph_cann_register(const cann::EngineCallbacks* callbacks) {
  cann::registered = *callbacks;
  cann::is_registered = true;
}

void moe_graph_cann_unregister() { cann::is_registered = false; }

void moe_graph_cann_set_error(const char* message) { cann::set_error(message); }
}

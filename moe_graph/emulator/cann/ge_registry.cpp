// What GE knows about an operator type: answered by the Python engine, from its operator table.
#include <cstring>
#include <map>
#include <utility>

#include "engine.h"
#include "error.h"
#include "ge_types.h"

namespace ge {
namespace {

using NamedTypes = std::vector<std::pair<AscendString, AscendString>>;

struct IrDefinition {
  NamedTypes inputs;
  NamedTypes outputs;
  NamedTypes attributes;
};

// True when the engine knows `op_type`.
bool find_definition(const char* op_type, IrDefinition& definition) {
  const cann::EngineCallbacks* const engine = cann::engine();
  return engine != nullptr && op_type != nullptr &&
         engine->ir_definition(op_type, &definition) == 0;
}

bool has_input(const NamedTypes& inputs, const std::string& name) {
  for (const auto& [input, kind] : inputs) {
    const std::string known = input.GetString();
    if (known == name) {
      return true;
    }
    // Inputs of a dynamic port are numbered: x0, x1, ...
    if (std::strcmp(kind.GetString(), "dynamic") == 0 && name.size() > known.size() &&
        name.compare(0, known.size(), known) == 0 &&
        name.find_first_not_of("0123456789", known.size()) == std::string::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace

struct OperatorImpl {
  IrDefinition definition;
};

// Callers destroy it through its virtual destructor and see one shared pointer.
class CANN_API Operator {
 public:
  explicit Operator(std::shared_ptr<OperatorImpl> impl) : impl_(std::move(impl)) {}
  virtual ~Operator() = default;
  Status UpdateInputDesc(const char* name, const TensorDesc& description);
  Status GetAllIrAttrNamesAndTypes(Options& names_and_types) const;

 private:
  std::shared_ptr<OperatorImpl> impl_;
};

Status Operator::UpdateInputDesc(const char* name, const TensorDesc&) {
  return has_input(impl_->definition.inputs, name) ? kSuccess : kFailed;
}

Status Operator::GetAllIrAttrNamesAndTypes(Options& names_and_types) const {
  for (const auto& [name, type] : impl_->definition.attributes) {
    names_and_types[name] = type;
  }
  return kSuccess;
}

class CANN_API OperatorFactory {
 public:
  static Operator CreateOperator(const char* name, const char* type);
  static bool IsExistOp(const char* type);
};

Operator OperatorFactory::CreateOperator(const char*, const char* type) {
  auto impl = std::make_shared<OperatorImpl>();
  find_definition(type, impl->definition);
  return Operator(std::move(impl));
}

bool OperatorFactory::IsExistOp(const char* type) {
  IrDefinition definition;
  return find_definition(type, definition);
}

}  // namespace ge

extern "C" {

CANN_API ge::Status GetRegisteredIrDef(const char* op_type, ge::NamedTypes& inputs,
                                       ge::NamedTypes& outputs, ge::NamedTypes& attributes) {
  ge::IrDefinition definition;
  if (!ge::find_definition(op_type, definition)) {
    return ge::kFailed;
  }
  inputs = std::move(definition.inputs);
  outputs = std::move(definition.outputs);
  attributes = std::move(definition.attributes);
  return ge::kSuccess;
}

void moe_graph_cann_emit_ir(void* sink, int kind, const char* name, const char* type) {
  auto* const definition = static_cast<ge::IrDefinition*>(sink);
  ge::NamedTypes* const lists[] = {&definition->inputs, &definition->outputs,
                                   &definition->attributes};
  lists[kind]->emplace_back(name, type);
}
}

// Decides what becomes of each operator, and puts the kernels in place.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "census.h"
#include "fused.h"
#include "link.h"
#include "own.h"
#include "simulate.h"

namespace ascendsim::kernels {
namespace {

using c10::DispatchKey;
using c10::OperatorHandle;

// torch_npu's own code, which needs no kernel of the device: allocation, views, storages, streams,
// pinned memory, formats.
const std::unordered_set<std::string>& kept() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::new_empty_strided",
      "aten::resize_",
      "aten::set_",
      "aten::set_.source_Storage",
      "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Tensor",
      "aten::is_set_to",
      "aten::as_strided",
      "aten::as_strided_",
      "aten::view",
      "aten::_reshape_alias",
      "aten::view_as_complex",
      "aten::view_as_real",
      "aten::unfold",
      "aten::alias",
      "aten::detach",
      "aten::_has_compatible_shallow_copy_type",
      "aten::_local_scalar_dense",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
      "aten::record_stream",
      "aten::scaled_dot_product_attention",  // chooses between npu_fusion_attention and the maths
      "aten::is_pinned",
      "aten::_pin_memory",
      "npu::copy_memory_",
      "npu::empty_with_format",
      "npu::empty_with_swapped_memory",
      "npu::get_npu_format",
      "npu::get_storage_size",
      "npu::npu_change_data_ptr",
      "npu::unsafe_empty_with_format",
  };
  return *names;
}

struct Registered {
  explicit Registered(const OperatorHandle& op)
      : npu(op.hasKernelForDispatchKey(DispatchKey::PrivateUse1)),
        npu_autograd(op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1)),
        cpu(op.hasKernelForDispatchKey(DispatchKey::CPU)),
        autograd(op.hasKernelForDispatchKey(DispatchKey::Autograd)),
        implicit(op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)),
        explicit_(op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)),
        structured(
            op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional)) {}

  bool composite() const { return implicit || explicit_ || structured; }

  bool npu, npu_autograd, cpu, autograd, implicit, explicit_, structured;
};

template <DispatchKey key>
void call_key(const OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(key, *stack);
}

template <DispatchKey key>
torch::CppFunction redirected() {
  return torch::CppFunction::makeFromBoxedFunction<&call_key<key>>();
}

// Composites that make a view, or that allocate and then call operators of the device, as in
// reality: factories and conversions, which take a device, and two that only loop.
bool prefers_composite(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name == "aten::_foreach_copy_" || name == "aten::resize_as_") return true;
  for (const c10::Argument& argument : op.schema().arguments()) {
    if (argument.name() == "device") return true;
  }
  for (const c10::Argument& result : op.schema().returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

class Installer {
 public:
  Installer()
      : aten_(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__),
        aten_autograd_(torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1, __FILE__,
                       __LINE__),
        npu_(torch::Library::IMPL, "npu", DispatchKey::PrivateUse1, __FILE__, __LINE__) {}

  int install() {
    own(register_own(aten_));
    own(register_attention(npu_));
    own(register_optimizer(npu_));
    own(register_formats(npu_));
    std::vector<HostKernel> fused;
    append_activations(fused);
    append_norms(fused);
    append_rotary(fused);
    append_matmuls(fused);
    append_casts(fused);
    for (HostKernel& kernel : fused) own_kernels_.emplace(kernel.name, std::move(kernel));
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const std::optional<OperatorHandle> op = dispatcher.findSchema(name);
      if (op) place(*op);
    }
    return overridden_;
  }

 private:
  void own(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      own_.insert(name);
      census().add(Fate::kSimulated, name);
      ++overridden_;
    }
  }

  void place(const OperatorHandle& op) {
    const std::string name = full_name(op.operator_name());
    const bool is_aten = name.rfind("aten::", 0) == 0;
    if (!is_aten && name.rfind("npu::", 0) != 0) return;
    const Registered registered(op);
    if (registered.npu && kept().count(name)) return census().add(Fate::kKept, name);
    if (is_aten && registered.npu_autograd) place_autograd(name, registered);
    if (own_.count(name)) return;
    torch::Library& library = is_aten ? aten_ : npu_;
    if (!registered.npu) {
      if (is_aten && registered.cpu && !registered.composite()) leave(op, name);
    } else if (registered.implicit && !registered.cpu) {
      implement(library, name, redirected<DispatchKey::CompositeImplicitAutograd>(),
                Fate::kComposed);
    } else if (registered.explicit_ && prefers_composite(op)) {
      implement(library, name, redirected<DispatchKey::CompositeExplicitAutograd>(),
                Fate::kComposed);
    } else if (own_kernels_.count(name)) {
      simulate(library, op, name, std::move(own_kernels_.at(name)));
    } else if (registered.cpu || registered.explicit_ || registered.structured) {
      simulate(library, op, name, std::nullopt);
    } else {
      auto kernel = std::make_unique<AbsentOperator>(name);
      implement(library, name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)),
                Fate::kAbsent);
    }
  }

  // torch_npu's formulas call its own kernels directly; torch's formulas call operators.
  void place_autograd(const std::string& name, const Registered& registered) {
    if (registered.implicit && !registered.cpu) {
      aten_autograd_.impl(short_name(name).c_str(),
                          redirected<DispatchKey::CompositeImplicitAutograd>());
    } else if (registered.autograd) {
      aten_autograd_.impl(short_name(name).c_str(), redirected<DispatchKey::Autograd>());
    }
  }

  void simulate(torch::Library& library, const OperatorHandle& op, const std::string& name,
                std::optional<HostKernel> own) {
    auto kernel = std::make_unique<SimulatedOperator>(op, std::move(own));
    implement(library, name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)),
              Fate::kSimulated);
  }

  void leave(const OperatorHandle& op, const std::string& name) {
    census().add(Fate::kLeft, name);
    if (!op.hasComputedKernelForDispatchKey(DispatchKey::PrivateUse1)) return;
    auto kernel = std::make_unique<LeftOperator>(op);
    aten_.impl(short_name(name).c_str(),
               torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }

  void implement(torch::Library& library, const std::string& name, torch::CppFunction kernel,
                 Fate fate) {
    library.impl(short_name(name).c_str(), std::move(kernel));
    census().add(fate, name);
    if (fate != Fate::kAbsent) ++overridden_;
  }

  static std::string short_name(const std::string& name) {
    return name.substr(name.find("::") + 2);
  }

  torch::Library aten_, aten_autograd_, npu_;
  std::unordered_map<std::string, HostKernel> own_kernels_;
  std::unordered_set<std::string> own_;
  int overridden_ = 0;
};

uint64_t write_text(const std::string& text, char* buffer, uint64_t size) {
  if (size > 0) std::snprintf(buffer, size, "%s", text.c_str());
  return text.size() + 1;
}

}  // namespace
}  // namespace ascendsim::kernels

using namespace ascendsim::kernels;  // NOLINT: the exported C functions below

ASCENDSIM_API int ascendsim_kernels_install(int strict, char* error, uint64_t error_size) {
  try {
    connect();
    set_strict(strict != 0);
    static auto* installer = new Installer;  // the registrations last as long as the process
    return installer->install();
  } catch (const std::exception& e) {
    write_text(e.what(), error, error_size);
    return -1;
  }
}

ASCENDSIM_API void ascendsim_kernels_strict(int strict) { set_strict(strict != 0); }

// Writes the names of all operators of one Fate, a line each, and returns the size this needs.
ASCENDSIM_API uint64_t ascendsim_kernels_names(int32_t fate, char* buffer, uint64_t size) {
  std::ostringstream text;
  for (const std::string& name : census().names(static_cast<Fate>(fate))) text << name << '\n';
  return write_text(text.str(), buffer, size);
}

// Writes "name calls" of each operator that was left to torch_npu and called, a line each.
ASCENDSIM_API uint64_t ascendsim_kernels_left_calls(char* buffer, uint64_t size) {
  std::ostringstream text;
  for (const auto& [name, calls] : left_calls()) text << name << ' ' << calls << '\n';
  return write_text(text.str(), buffer, size);
}

// Calls so far: enqueued, run inline, with outputs that were already known.
ASCENDSIM_API void ascendsim_kernels_calls(uint64_t* counts) {
  const CallCounts calls = call_counts();
  counts[0] = calls.enqueued;
  counts[1] = calls.inline_;
  counts[2] = calls.plan_hits;
}

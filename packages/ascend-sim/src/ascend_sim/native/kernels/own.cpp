#include "own.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include "alias.h"
#include "simulate.h"

namespace ascendsim::kernels {
namespace {

// [Note: copies]
//
// torch_npu's own kernel makes every copy between two memories that is one block of bytes: between
// contiguous tensors of one dtype. So pinned blocks are recorded, transfers counted and timed, and
// pageable memory waits, as in reality. Any other transfer is cast and laid out on the side where
// the source is, then sent as a block, then laid out on the side of the destination. A copy within
// one device is a kernel.
class Copy {
 public:
  explicit Copy(const c10::OperatorHandle& op)
      : op_(op),
        torch_npu_(op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1)),
        on_device_(op, std::nullopt) {}

  void operator()(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    if (is_npu(to) && to.device() == from.device()) {
      torch::jit::Stack stack{to, from, non_blocking};
      on_device_(op_, {}, &stack);
    } else if (is_block(to, from)) {
      block(to, from, non_blocking);
    } else {
      staged(to, from, non_blocking);
    }
  }

 private:
  static bool is_block(const at::Tensor& to, const at::Tensor& from) {
    return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
           to.is_contiguous() && from.is_contiguous() && to.is_conj() == from.is_conj() &&
           to.is_neg() == from.is_neg();
  }

  void block(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    torch::jit::Stack stack{to, from, non_blocking};
    torch_npu_.callBoxed(op_, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
  }

  void staged(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    const at::Tensor packed =
        from.to(to.scalar_type()).expand(to.sizes()).contiguous().resolve_conj().resolve_neg();
    if (is_block(to, packed)) return block(to, packed, non_blocking);
    at::Tensor landed = at::empty(to.sizes(), to.options());
    // Laying out on the host reads the bytes, so they must have arrived.
    block(landed, packed, is_npu(to) && non_blocking);
    to.copy_(landed);
  }

  const c10::OperatorHandle op_;
  const c10::SafeKernelFunction torch_npu_;
  SimulatedOperator on_device_;
};

Copy& copy() {
  static auto* kernel = new Copy(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  return *kernel;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.numel() > 0) copy()(self, src, non_blocking);
  return self;
}

// The schema has no generator argument: the host's kernel would draw from the CPU's generator, and
// at the time of execution. Recomputing a region with dropout needs the device's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (p == 0 || !train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, mask_options)};
  }
  at::Tensor mask = at::empty_like(input, mask_options).bernoulli_(1 - p);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

// This overload has no generator argument either.
at::Tensor& randperm_out(int64_t n, at::Tensor& out) {
  return at::randperm_out(out, n, /*generator=*/std::nullopt);
}

}  // namespace

std::vector<std::string> register_own(torch::Library& aten) {
  copy();  // takes torch_npu's kernel before it is replaced
  aten.impl("copy_", TORCH_FN(copy_));
  aten.impl("native_dropout", TORCH_FN(native_dropout));
  aten.impl("randperm.out", TORCH_FN(randperm_out));
  return {"aten::copy_", "aten::native_dropout", "aten::randperm.out"};
}

}  // namespace ascendsim::kernels

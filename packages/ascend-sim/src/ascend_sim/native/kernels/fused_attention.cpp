// npu_fusion_attention, its versions 2 and 3, and their gradients: arguments, limits, outputs.
// torch_npu's scaled_dot_product_attention calls version 3.
#include <ATen/ATen.h>

#include <array>
#include <string_view>
#include <utility>

#include "alias.h"
#include "attention.h"
#include "attention_checks.h"
#include "devices.h"
#include "fused.h"
#include "launch.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;

constexpr int64_t kSoftmaxCopies = 8;
// The scores are computed anew.
constexpr int64_t kForwardMatmuls = 2, kBackwardMatmuls = 5;

// The arguments of one call by name: the schemas differ in order, in spelling and in
// whether a list or a number is a tensor on the host.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op_(op), first_(stack.end() - op.schema().arguments().size()) {}

  const c10::IValue& get(std::string_view name) const {
    const std::vector<c10::Argument>& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == name) return *(first_ + i);
    }
    static const c10::IValue none;
    return none;
  }

  Tensor tensor(std::string_view name) const {
    const c10::IValue& value = get(name);
    return value.isTensor() ? value.toTensor() : Tensor();
  }

  int64_t integer(std::string_view name, int64_t otherwise) const {
    const c10::IValue& value = get(name);
    if (value.isTensor() && value.toTensor().defined()) return value.toTensor().item<int64_t>();
    return value.isInt() ? value.toInt() : otherwise;
  }

  std::vector<int64_t> integers(std::string_view name) const {
    const c10::IValue& value = get(name);
    if (value.isIntList()) return value.toIntVector();
    if (!value.isTensor() || !value.toTensor().defined()) return {};
    const Tensor list = value.toTensor().to(at::kCPU, at::kLong).contiguous();
    const auto* data = list.const_data_ptr<int64_t>();
    return {data, data + list.numel()};
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack::const_iterator first_;
};

Layout layout_of(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, Layout>, 5> kLayouts{{{"BNSD", Layout::kBNSD},
                                                                         {"BSND", Layout::kBSND},
                                                                         {"BSH", Layout::kBSH},
                                                                         {"SBH", Layout::kSBH},
                                                                         {"TND", Layout::kTND}}};
  for (const auto& [known, layout] : kLayouts) {
    if (known == name) return layout;
  }
  TORCH_CHECK(false, "The input_layout should be BSH/SBH/BNSD/BSND/TND(case-insensitive), but got ",
              name);
}

int64_t first_of(const std::vector<int64_t>& list) { return list.empty() ? 0 : list[0]; }

AttentionOptions options_of(const Arguments& arguments, bool gradient) {
  AttentionOptions options{};
  std::string layout = arguments.get("input_layout").toStringRef();
  for (char& c : layout) c = static_cast<char>(std::toupper(c));
  options.layout = layout_of(layout);
  options.heads = arguments.integer("head_num", 0);
  options.scale = arguments.get(gradient ? "scale_value" : "scale").toDouble();
  options.keep_prob = arguments.get("keep_prob").toDouble();
  options.sparse_mode = arguments.integer("sparse_mode", kDefaultMask);
  options.pre_tokens = arguments.integer("pre_tockens", arguments.integer("pre_tokens", 0));
  options.next_tokens = arguments.integer("next_tockens", arguments.integer("next_tokens", 0));
  options.pse_type = arguments.integer("pse_type", kPseAddMul);
  options.q_start = first_of(arguments.integers("q_start_idx"));
  options.kv_start = first_of(arguments.integers("kv_start_idx"));
  options.q_ends = arguments.integers("actual_seq_qlen");
  options.kv_ends = arguments.integers("actual_seq_kvlen");
  options.softmax_in_tnd = arguments.get("softmax_layout").toStringRef() == "TND";
  options.draw = {arguments.integer("seed", 0), arguments.integer("offset", 0)};
  return options;
}

AttentionInputs inputs_of(const Arguments& arguments) {
  return {arguments.tensor("query"), arguments.tensor("key"), arguments.tensor("value"),
          arguments.tensor("pse"), arguments.tensor("atten_mask")};
}

// What the real operator has and the simulated one does not.
void refuse_unsupported(const Arguments& arguments, const AttentionOptions& options) {
  for (const char* name : {"padding_mask", "query_rope", "key_rope", "sink", "dropout_mask"}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!arguments.tensor(name).defined(),
                                "[ascend-sim] npu_fusion_attention: ", name, " is not simulated");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(options.sparse_mode <= kBand,
                              "[ascend-sim] npu_fusion_attention: sparse_mode ",
                              options.sparse_mode, " is not simulated; 0 to 4 are");
}

c10::Device device_of(const AttentionInputs& in) {
  CommonDevice device("npu::npu_fusion_attention");
  for (const Tensor* t : {&in.query, &in.key, &in.value, &in.pse, &in.mask}) device.add(*t);
  return *device.get();
}

struct Call {
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack, bool gradient)
      : arguments(op, stack),
        inputs(inputs_of(arguments)),
        options(options_of(arguments, gradient)),
        device(device_of(inputs)),
        sizes(check_attention(inputs, options)) {
    refuse_unsupported(arguments, options);
  }

  AttentionInputs host_inputs() const {
    const auto host = [](const Tensor& t) { return t.defined() ? host_alias(t) : t; };
    return {host(inputs.query), host(inputs.key), host(inputs.value), host(inputs.pse),
            host(inputs.mask)};
  }

  // The number of bits of the dropout mask: one per query, key and head.
  int64_t mask_size() const {
    if (options.layout != Layout::kTND) {
      return sizes.batch * sizes.heads * sizes.q_length * sizes.kv_length;
    }
    int64_t pairs = 0, q = 0, kv = 0;
    for (size_t i = 0; i < options.q_ends.size(); ++i) {
      pairs += (options.q_ends[i] - q) * (options.kv_ends[i] - kv);
      q = options.q_ends[i];
      kv = options.kv_ends[i];
    }
    return options.heads * pairs;
  }

  // Its inputs read, and that many matrices of scores, as torch.utils.flop_counter counts: a mask
  // saves nothing.
  Work work(int64_t matmuls) const {
    Work work;
    const auto& [q, k, v, pse, mask] = inputs;
    for (const Tensor& t : {q, k, v, pse, mask}) work.read(t);
    const bool hidden = options.layout == Layout::kBSH || options.layout == Layout::kSBH;
    const int64_t head_size = hidden ? q.size(-1) / options.heads : q.size(-1);
    work.multiply(2 * matmuls * mask_size() * head_size, q.element_size());
    return work;
  }

  Arguments arguments;
  AttentionInputs inputs;
  AttentionOptions options;
  c10::Device device;
  Geometry sizes;
};

// The query's shape with the value's head size.
std::vector<int64_t> output_sizes(const Call& call) {
  std::vector<int64_t> sizes = call.inputs.query.sizes().vec();
  const bool hidden = call.options.layout == Layout::kBSH || call.options.layout == Layout::kSBH;
  sizes.back() = (hidden ? call.sizes.heads : 1) * call.sizes.value_head_size;
  return sizes;
}

void check_gradient(const Call& call, const Tensor& dy) {
  CommonDevice device("npu::npu_fusion_attention_grad");
  device.add(call.inputs.query);
  device.add(dy);
  TORCH_CHECK(dy.sizes() == output_sizes(call) && dy.dtype() == call.inputs.query.dtype(),
              "npu_fusion_attention_grad: dy must have the shape ", output_sizes(call),
              " and the dtype ", call.inputs.query.dtype(), " of the output, but has ", dy.sizes(),
              " and ", dy.dtype());
}

std::vector<int64_t> softmax_sizes(const Call& call) {
  const int64_t n = call.sizes.heads, s = call.sizes.q_length;
  if (call.options.layout == Layout::kTND) return {s, n, kSoftmaxCopies};
  return {call.sizes.batch, n, s, kSoftmaxCopies};
}

Tensor host_scalar(int64_t value) {
  return at::full({1}, value, at::TensorOptions().dtype(at::kLong));
}

void forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack, /*gradient=*/false);
  const bool drops = call.options.keep_prob < 1;
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.options.draw.seed == 0 && call.options.draw.offset == 0,
      "[ascend-sim] npu_fusion_attention: seed and offset are not simulated");
  if (drops) call.options.draw = draw_from(default_generator(call.device.index()));
  const Draw draw = call.options.draw;
  const auto options = call.inputs.query.options();
  const Tensor output = at::empty(output_sizes(call), options);
  const Tensor max = at::empty(softmax_sizes(call), options.dtype(at::kFloat));
  const Tensor sum = at::empty_like(max);
  auto body = [in = call.host_inputs(), how = call.options, o = host_alias(output),
               m = host_alias(max), s = host_alias(sum)] { attention_forward(in, how, o, m, s); };
  Work work = call.work(kForwardMatmuls);
  for (const Tensor& t : {output, max, sum}) work.write(t);
  launch("npu::npu_fusion_attention", call.device.index(), work, std::move(body));
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, output, max, sum, at::empty({0}, options));
  if (op.schema().returns()[4].type()->kind() == c10::TypeKind::TensorType) {
    torch::jit::push(*stack, host_scalar(draw.seed), host_scalar(draw.offset));
  } else {
    torch::jit::push(*stack, draw.seed, draw.offset, call.mask_size());
  }
}

void backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack, /*gradient=*/true);
  const AttentionInputs& in = call.inputs;
  const Tensor dy = call.arguments.tensor("dy");
  check_gradient(call, dy);
  // A compressed encoding is computed, and not learnt.
  const bool learns_pse = in.pse.defined() && call.options.pse_type < kPseSlopes &&
                          !is_compressed(in.pse, call.options, call.sizes.q_length);
  const AttentionGrads grads{at::empty(in.query.sizes(), in.query.options()),
                             at::empty(in.key.sizes(), in.key.options()),
                             at::empty(in.value.sizes(), in.value.options()),
                             learns_pse ? at::empty(in.pse.sizes(), in.pse.options()) : Tensor()};
  const AttentionGrads places{host_alias(grads.query), host_alias(grads.key),
                              host_alias(grads.value),
                              learns_pse ? host_alias(grads.pse) : Tensor()};
  auto body = [in = call.host_inputs(), how = call.options, places, grad = host_alias(dy)] {
    attention_backward(in, grad, how, places);
  };
  Work work = call.work(kBackwardMatmuls);
  for (const Tensor& t : {grads.query, grads.key, grads.value, grads.pse}) work.write(t);
  work.read(dy);
  launch("npu::npu_fusion_attention_grad", call.device.index(), work, std::move(body));
  const size_t returns = op.schema().returns().size();
  const Tensor none = at::empty({0}, in.query.options());  // gradients of sink and of the ropes
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, grads.query, grads.key, grads.value, grads.pse);
  for (size_t r = 4; r < returns; ++r) torch::jit::push(*stack, none);
}

}  // namespace

std::vector<std::string> register_attention(torch::Library& npu) {
  std::vector<std::string> names;
  for (const char* name :
       {"npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"}) {
    npu.impl(name, torch::CppFunction::makeFromBoxedFunction<&forward>());
    names.push_back(std::string("npu::") + name);
  }
  for (const char* name : {"npu_fusion_attention_grad", "npu_fusion_attention_grad_v2",
                           "npu_fusion_attention_grad_v3"}) {
    npu.impl(name, torch::CppFunction::makeFromBoxedFunction<&backward>());
    names.push_back(std::string("npu::") + name);
  }
  return names;
}

}  // namespace ascendsim::kernels

#include "attention_parts.h"

#include <ATen/ATen.h>

#include <limits>

namespace ascendsim::kernels {
namespace {

using at::Tensor;

constexpr int64_t kCompressed = 2048;  // side of the compressed mask of modes 2, 3 and 4
constexpr int64_t kUnbounded = 2147483647;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// column - row, [S, T], from the upper left corner.
Tensor diagonals(int64_t s, int64_t t) {
  const Tensor rows = at::arange(s, at::kLong).unsqueeze(1);
  return at::arange(t, at::kLong).unsqueeze(0) - rows;
}

// What the compressed mask says about a distance from its diagonal. The device reads the mask that
// it is given, so a wrong one must give a wrong result here too.
Tensor read_compressed(const Tensor& mask, const Tensor& distance) {
  const Tensor row = (-distance).clamp(0, kCompressed - 1);
  const Tensor column = distance.clamp(0, kCompressed - 1);
  return mask.index({row, column});
}

Tensor compressed(const Tensor& mask, const AttentionOptions& options, int64_t s, int64_t t) {
  Tensor distance = diagonals(s, t);
  if (options.sparse_mode != kLeftUpCausal) distance = distance - (t - s);
  if (options.sparse_mode != kBand) return read_compressed(mask, distance);
  const Tensor after = read_compressed(mask, distance - options.next_tokens);
  const Tensor from = read_compressed(mask, distance + options.pre_tokens + 1);
  return after.logical_or(from.logical_not());
}

// Blocks outside the band are skipped on the device, whatever the mask says there: it must agree.
void check_band(const Tensor& mask, const AttentionOptions& options, int64_t s, int64_t t) {
  if (options.pre_tokens >= kUnbounded && options.next_tokens >= kUnbounded) return;
  const Tensor distance = diagonals(s, t);
  const Tensor outside =
      distance.gt(options.next_tokens).logical_or(distance.lt(-options.pre_tokens));
  TORCH_CHECK(!outside.logical_and(mask.logical_not()).any().item<bool>(),
              "atten_mask lets positions through that pre_tockens ", options.pre_tokens,
              " and next_tockens ", options.next_tokens,
              " exclude: a real NPU computes only some of them");
}

// A compressed encoding holds the last 1024 rows of the longest sequence; earlier rows, and shorter
// sequences, have the same values, shifted, as alibi depends on the distance alone.
Tensor expand_alibi(const Tensor& pse, int64_t s, int64_t t) {
  const int64_t longest = pse.size(-1);
  const Tensor rows = at::arange(s, at::kLong).unsqueeze(1) + (kEncodedRows - s);
  const Tensor columns = at::arange(t, at::kLong).unsqueeze(0) + (longest - s) - rows.clamp_max(0);
  return pse.index({at::indexing::Slice(), at::indexing::Slice(), rows.clamp_min(0),
                    columns.clamp_max(longest - 1)});
}

// [N] or [B, N] slopes: minus slope times the distance from the shifted diagonal, or times its
// root.
Tensor alibi(const Tensor& slopes, const AttentionOptions& options, int64_t s, int64_t t) {
  const Tensor shifted = diagonals(s, t) + (options.kv_start - options.q_start);
  Tensor distance = shifted.abs().to(at::kFloat);
  if (options.pse_type == kPseSlopesSqrt) distance = distance.sqrt();
  const Tensor per_head = slopes.to(at::kFloat).unsqueeze(-1).unsqueeze(-1);
  return per_head.mul(distance).neg();
}

bool is_causal(const AttentionOptions& options, const Tensor& masked) {
  return masked.defined() && options.sparse_mode == kLeftUpCausal;
}

// As torch turns a boolean mask into one that is added.
std::optional<Tensor> additive(const Tensor& masked, at::ScalarType dtype) {
  if (!masked.defined()) return std::nullopt;
  const Tensor zeros = at::zeros(masked.sizes(), masked.options().dtype(dtype));
  return zeros.masked_fill(masked, kMinusInfinity);
}

// The causal shortcut reads no mask: it may stand for one only if that is the triangle.
std::optional<Tensor> plain_mask(const Tensor& masked, const AttentionOptions& options,
                                 at::ScalarType dtype, bool& causal) {
  causal = is_causal(options, masked) &&
           masked.equal(at::ones(masked.sizes(), masked.options()).triu(1));
  if (causal) return std::nullopt;
  std::optional<Tensor> mask = additive(masked, dtype);
  while (mask && mask->dim() < 4) mask = mask->unsqueeze(0);
  return mask;
}

}  // namespace

Tensor masked_positions(const Tensor& mask, const AttentionOptions& options, int64_t s, int64_t t) {
  if (!mask.defined()) return mask;
  const Tensor flags = mask.to(at::kBool);
  if (options.sparse_mode >= kLeftUpCausal) return compressed(flags, options, s, t);
  Tensor fitting = flags;
  if (options.layout == Layout::kTND) {
    fitting = flags.slice(-2, 0, s).slice(-1, 0, t);
  }
  if (options.sparse_mode == kDefaultMask) check_band(fitting, options, s, t);
  return fitting;
}

Tensor position_encoding(const Tensor& pse, const AttentionOptions& options, bool compressed,
                         int64_t s, int64_t t) {
  if (!pse.defined()) return pse;
  if (options.pse_type >= kPseSlopes) return alibi(pse, options, s, t);
  return (compressed ? expand_alibi(pse, s, t) : pse).to(at::kFloat);
}

Softmax softmax(const Sequences& sequences, const Tensor& masked, const Tensor& encoding,
                const AttentionOptions& options) {
  const Tensor q = sequences.query.to(at::kFloat);
  const Tensor k = spread_heads(sequences.key.to(at::kFloat), q.size(1));
  Tensor scores = at::matmul(q, k.transpose(-1, -2));
  if (encoding.defined() && options.pse_type == kPseAddMul) scores.add_(encoding);
  scores.mul_(options.scale);
  if (encoding.defined() && options.pse_type != kPseAddMul) scores.add_(encoding);
  if (masked.defined()) scores.masked_fill_(masked, kMinusInfinity);
  const Tensor max = scores.amax(-1, /*keepdim=*/true);
  // In a row that is masked whole, -inf minus -inf: it shall become 0.
  const Tensor powers = scores.sub_(max).exp_().nan_to_num_(0.0);
  const Tensor sum = powers.sum(-1, /*keepdim=*/true);
  return {powers.div_(sum.clamp_min(std::numeric_limits<float>::min())), max, sum};
}

bool is_plain(const Sequences& sequences, const Tensor& encoding, const AttentionOptions& options) {
  const bool one_size = sequences.value.size(-1) == sequences.query.size(-1);
  return one_size && !encoding.defined() && options.keep_prob == 1;
}

Tensor plain_forward(const Sequences& sequences, const Tensor& masked,
                     const AttentionOptions& options) {
  bool causal = false;
  const Tensor& q = sequences.query;
  const std::optional<Tensor> mask = plain_mask(masked, options, q.scalar_type(), causal);
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
      q, spread_heads(sequences.key, q.size(1)), spread_heads(sequences.value, q.size(1)),
      /*dropout_p=*/0, causal, mask, options.scale));
}

Sequences plain_backward(const Sequences& sequences, const Tensor& grad, const Tensor& masked,
                         const AttentionOptions& options) {
  bool causal = false;
  const Tensor& q = sequences.query;
  const std::optional<Tensor> mask = plain_mask(masked, options, q.scalar_type(), causal);
  const Tensor k = spread_heads(sequences.key, q.size(1));
  const Tensor v = spread_heads(sequences.value, q.size(1));
  // softmax_max and softmax_sum do not give the exact logarithm of the sum that torch's backward
  // wants, so the forward pass is repeated for it.
  const auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, /*dropout_p=*/0, causal, mask, options.scale);
  const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, k, v, output, log_sum, /*dropout_p=*/0, causal, mask, options.scale);
  return {dq, gather_heads(dk, sequences.key.size(1)), gather_heads(dv, sequences.value.size(1))};
}

Tensor spread_heads(const Tensor& t, int64_t heads) {
  return t.size(1) == heads ? t : t.repeat_interleave(heads / t.size(1), 1);
}

Tensor gather_heads(const Tensor& grad, int64_t heads) {
  return grad.size(1) == heads ? grad : grad.unflatten(1, {heads, -1}).sum(2);
}

}  // namespace ascendsim::kernels

#include "attention.h"

#include <ATen/ATen.h>

#include "attention_parts.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;

// A view of `t` as [B, heads, S, D]. `begin` and `end` are the rows of one sequence in TND.
Tensor as_bnsd(const Tensor& t, Layout layout, int64_t heads, int64_t begin, int64_t end) {
  switch (layout) {
    case Layout::kBNSD:
      return t;
    case Layout::kBSND:
      return t.transpose(1, 2);
    case Layout::kBSH:
      return t.unflatten(2, {heads, -1}).transpose(1, 2);
    case Layout::kSBH:
      return t.unflatten(2, {heads, -1}).permute({1, 2, 0, 3});
    case Layout::kTND:
      return t.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
  }
  TORCH_INTERNAL_ASSERT(false);
}

// One batch of sequences of equal length: everything, or one sequence of TND.
struct Part {
  int64_t q_begin = 0, q_end = 0, kv_begin = 0, kv_end = 0;
  int64_t sequence = 0;  // its number in TND
  int64_t pairs = 0;     // of queries and keys in the sequences before it
};

std::vector<Part> parts_of(const AttentionOptions& options) {
  if (options.layout != Layout::kTND) return {Part()};
  std::vector<Part> parts;
  int64_t q = 0, kv = 0, pairs = 0;
  for (size_t i = 0; i < options.q_ends.size(); ++i) {
    const int64_t q_end = options.q_ends[i], kv_end = options.kv_ends[i];
    if (q_end > q && kv_end > kv) {
      parts.push_back({q, q_end, kv, kv_end, static_cast<int64_t>(i), pairs});
      pairs += (q_end - q) * (kv_end - kv);
    }
    q = std::max(q, q_end);  // trailing zeros: sequences that take no part
    kv = std::max(kv, kv_end);
  }
  return parts;
}

int64_t key_heads(const AttentionInputs& inputs, const AttentionOptions& options) {
  switch (options.layout) {
    case Layout::kBNSD:
    case Layout::kTND:
      return inputs.key.size(1);
    case Layout::kBSND:
      return inputs.key.size(2);
    default:
      return inputs.key.size(2) / (inputs.query.size(2) / options.heads);
  }
}

Sequences sequences_of(const AttentionInputs& inputs, const AttentionOptions& options,
                       const Part& part) {
  const int64_t m = key_heads(inputs, options);
  return {as_bnsd(inputs.query, options.layout, options.heads, part.q_begin, part.q_end),
          as_bnsd(inputs.key, options.layout, m, part.kv_begin, part.kv_end),
          as_bnsd(inputs.value, options.layout, m, part.kv_begin, part.kv_end)};
}

// Where softmax_max or softmax_sum of a part lie, as [B, N, S, 8]. In TND the default is one block
// [N, S, 8] after the other, although the tensor's shape is [T, N, 8].
Tensor softmax_place(const Tensor& whole, const AttentionOptions& options, const Part& part) {
  if (options.layout != Layout::kTND) return whole;
  if (options.softmax_in_tnd) {
    return whole.slice(0, part.q_begin, part.q_end).transpose(0, 1).unsqueeze(0);
  }
  const int64_t n = options.heads;
  const Tensor rows = whole.view({-1, whole.size(-1)}).slice(0, part.q_begin * n, part.q_end * n);
  return rows.view({1, n, part.q_end - part.q_begin, whole.size(-1)});
}

// The part of pse that one sequence has, a view. In TND an encoding that is not compressed holds
// [N, S, T] of each sequence, or [N, 1, T], one after the other.
Tensor encoding_place(const Tensor& pse, const AttentionOptions& options, const Part& part) {
  if (!pse.defined() || options.layout != Layout::kTND) return pse;
  if (options.pse_type >= kPseSlopes) return pse.dim() == 1 ? pse : pse.select(0, part.sequence);
  if (pse.dim() == 4) return pse.size(0) == 1 ? pse : pse.narrow(0, part.sequence, 1);
  const int64_t n = options.heads, t = part.kv_end - part.kv_begin;
  const bool one_row = pse.size(0) == n * options.kv_ends.back();
  const int64_t rows = one_row ? 1 : part.q_end - part.q_begin;
  const int64_t begin = n * (one_row ? part.kv_begin : part.pairs);
  return pse.narrow(0, begin, n * rows * t).view({1, n, rows, t});
}

struct PartSetup {
  Sequences sequences;
  Tensor masked, encoding;
};

PartSetup set_up(const AttentionInputs& inputs, const AttentionOptions& options, const Part& part) {
  Sequences sequences = sequences_of(inputs, options, part);
  const int64_t s = sequences.query.size(2), t = sequences.key.size(2);
  Tensor masked = masked_positions(inputs.mask, options, s, t);
  Tensor encoding = position_encoding(encoding_place(inputs.pse, options, part), options,
                                      is_compressed(inputs.pse, options, s), s, t);
  return {std::move(sequences), std::move(masked), std::move(encoding)};
}

// Which probabilities stay, already divided by keep_prob; undefined without dropout. All parts
// draw from one generator, in their order.
Tensor kept(const Tensor& probabilities, double keep_prob,
            std::optional<at::Generator>& generator) {
  if (!generator) return Tensor();
  return at::empty_like(probabilities).bernoulli_(keep_prob, *generator).div_(keep_prob);
}

std::optional<at::Generator> dropout_generator(const AttentionOptions& options) {
  if (options.keep_prob == 1) return std::nullopt;
  return host_generator(options.draw);
}

// The gradient of pse: the scores' gradient, summed where pse was broadcast.
void add_pse_grad(const Tensor& scores_grad, const AttentionOptions& options, const Tensor& place) {
  const Tensor grad = options.pse_type == kPseAddMul ? scores_grad * options.scale : scores_grad;
  place.copy_(grad.sum_to_size(place.sizes()));
}

Sequences backward_of(const PartSetup& part, const Tensor& grad, const AttentionOptions& options,
                      std::optional<at::Generator>& generator, const Tensor& pse_grad) {
  const Sequences& in = part.sequences;
  const Tensor p = softmax(in, part.masked, part.encoding, options).probabilities;
  const Tensor keep = kept(p, options.keep_prob, generator);
  const int64_t n = in.query.size(1), m = in.key.size(1);
  const Tensor q = in.query.to(at::kFloat), g = grad.to(at::kFloat);
  const Tensor k = spread_heads(in.key.to(at::kFloat), n);
  const Tensor v = spread_heads(in.value.to(at::kFloat), n);
  const Tensor dropped = keep.defined() ? p * keep : p;
  const Tensor dv = at::matmul(dropped.transpose(-1, -2), g);
  Tensor dp = at::matmul(g, v.transpose(-1, -2));
  if (keep.defined()) dp.mul_(keep);
  const Tensor ds = p * (dp - (dp * p).sum(-1, /*keepdim=*/true));
  if (pse_grad.defined()) add_pse_grad(ds, options, pse_grad);
  const Tensor dq = at::matmul(ds, k).mul_(options.scale);
  const Tensor dk = at::matmul(ds.transpose(-1, -2), q).mul_(options.scale);
  return {dq, gather_heads(dk, m), gather_heads(dv, m)};
}

}  // namespace

bool is_compressed(const Tensor& pse, const AttentionOptions& options, int64_t s) {
  if (!pse.defined() || pse.dim() != 4 || pse.size(2) != kEncodedRows) return false;
  return options.layout == Layout::kTND || s > kEncodedRows;
}

void attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                       const Tensor& output, const Tensor& softmax_max, const Tensor& softmax_sum) {
  std::optional<at::Generator> generator = dropout_generator(options);
  if (options.layout == Layout::kTND) {
    for (const Tensor* t : {&output, &softmax_max, &softmax_sum}) t->zero_();
  }
  for (const Part& rows : parts_of(options)) {
    const PartSetup part = set_up(inputs, options, rows);
    const Softmax s = softmax(part.sequences, part.masked, part.encoding, options);
    softmax_place(softmax_max, options, rows).copy_(s.max.expand({-1, -1, -1, 8}));
    softmax_place(softmax_sum, options, rows).copy_(s.sum.expand({-1, -1, -1, 8}));
    Tensor attended;
    if (is_plain(part.sequences, part.encoding, options)) {
      attended = plain_forward(part.sequences, part.masked, options);
    } else {
      const Tensor keep = kept(s.probabilities, options.keep_prob, generator);
      const Tensor p = keep.defined() ? s.probabilities * keep : s.probabilities;
      const Tensor& value = part.sequences.value;
      attended = at::matmul(p, spread_heads(value.to(at::kFloat), options.heads));
    }
    as_bnsd(output, options.layout, options.heads, rows.q_begin, rows.q_end).copy_(attended);
  }
}

void attention_backward(const AttentionInputs& inputs, const Tensor& grad,
                        const AttentionOptions& options, const AttentionGrads& grads) {
  std::optional<at::Generator> generator = dropout_generator(options);
  const AttentionInputs places{grads.query, grads.key, grads.value, {}, {}};
  if (options.layout == Layout::kTND) {
    for (const Tensor* t : {&grads.query, &grads.key, &grads.value}) t->zero_();
  }
  for (const Part& rows : parts_of(options)) {
    const PartSetup part = set_up(inputs, options, rows);
    const Tensor g = as_bnsd(grad, options.layout, options.heads, rows.q_begin, rows.q_end);
    const Tensor pse_grad = encoding_place(grads.pse, options, rows);
    const Sequences computed = is_plain(part.sequences, part.encoding, options)
                                   ? plain_backward(part.sequences, g, part.masked, options)
                                   : backward_of(part, g, options, generator, pse_grad);
    const Sequences place = sequences_of(places, options, rows);
    place.query.copy_(computed.query);
    place.key.copy_(computed.key);
    place.value.copy_(computed.value);
  }
}

}  // namespace ascendsim::kernels

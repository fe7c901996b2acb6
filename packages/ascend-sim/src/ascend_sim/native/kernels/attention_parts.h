// The parts of attention on one batch of sequences of equal length, as [B, N, S, D].
#pragma once

#include "attention.h"

namespace ascendsim::kernels {

// One batch of sequences of equal length. key and value have as many heads as the layout gave them.
struct Sequences {
  at::Tensor query, key, value;  // [B, N, S, D], [B, M, T, D], [B, M, T, Dv]
};

// The mask of positions that take no part, broadcastable to [B, N, S, T]; undefined for none.
at::Tensor masked_positions(const at::Tensor& mask, const AttentionOptions& options, int64_t s,
                            int64_t t);

// The position encoding that is added to the scores in fp32, broadcastable to [B, N, S, T];
// undefined for none. `pse` is the part's, which may be `compressed`.
at::Tensor position_encoding(const at::Tensor& pse, const AttentionOptions& options,
                             bool compressed, int64_t s, int64_t t);

struct Softmax {
  at::Tensor probabilities;  // [B, N, S, T]: 0 in rows that are masked whole
  at::Tensor max, sum;       // [B, N, S, 1]
};

Softmax softmax(const Sequences& sequences, const at::Tensor& masked, const at::Tensor& encoding,
                const AttentionOptions& options);

// Whether torch's attention for the CPU computes the same: then its bits are used, so that a model
// gives the same results on the CPU and here.
bool is_plain(const Sequences& sequences, const at::Tensor& encoding,
              const AttentionOptions& options);

at::Tensor plain_forward(const Sequences& sequences, const at::Tensor& masked,
                         const AttentionOptions& options);
Sequences plain_backward(const Sequences& sequences, const at::Tensor& grad,
                         const at::Tensor& masked, const AttentionOptions& options);

// Heads of key or value repeated so that there are as many as of the query, and the adjoint.
at::Tensor spread_heads(const at::Tensor& t, int64_t heads);
at::Tensor gather_heads(const at::Tensor& grad, int64_t heads);

}  // namespace ascendsim::kernels

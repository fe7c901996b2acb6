// npu_fusion_attention as a function of host tensors.
//
// Letters: B batch, N query heads, M key and value heads (N is a multiple of M), S length of the
// queries, T length of the keys, D head size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "generator.h"

namespace ascendsim::kernels {

enum class Layout { kBNSD, kBSND, kBSH, kSBH, kTND };

// sparse_mode, as documented. Without a mask every mode computes everything.
enum SparseMode : int64_t {
  kDefaultMask = 0,   // the mask, inside the band of pre_tokens and next_tokens
  kAllMask = 1,       // the mask
  kLeftUpCausal = 2,  // the compressed mask, diagonal from the upper left corner
  kRightDownCausal = 3,
  kBand = 4,  // the compressed mask, band from the lower right corner
};

enum PseType : int64_t {
  kPseMulAdd = 0,  // scale * q k + pse
  kPseAddMul = 1,  // scale * (q k + pse)
  kPseSlopes = 2,  // scale * q k - slope * distance
  kPseSlopesSqrt = 3,
};

// Rows of a compressed position encoding: the last ones of the whole.
constexpr int64_t kEncodedRows = 1024;

struct AttentionOptions {
  Layout layout;
  int64_t heads;
  double scale, keep_prob;
  int64_t sparse_mode, pre_tokens, next_tokens;
  int64_t pse_type, q_start, kv_start;
  std::vector<int64_t> q_ends, kv_ends;  // TND: cumulated lengths
  bool softmax_in_tnd;                   // TND: layout of softmax_max and softmax_sum
  Draw draw;                             // of the dropout mask, when keep_prob < 1
};

struct AttentionInputs {
  at::Tensor query, key, value, pse, mask;  // pse and mask may be undefined
};

// Whether `pse`, of pse_type 0 or 1, holds the last rows alone. `s` is the length of the queries.
bool is_compressed(const at::Tensor& pse, const AttentionOptions& options, int64_t s);

struct AttentionGrads {
  at::Tensor query, key, value, pse;
};

// Writes the attention, and each row's softmax maximum and sum, eight times over, in fp32.
void attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                       const at::Tensor& output, const at::Tensor& softmax_max,
                       const at::Tensor& softmax_sum);

// Writes the gradients, pse's only where it is defined.
void attention_backward(const AttentionInputs& inputs, const at::Tensor& grad,
                        const AttentionOptions& options, const AttentionGrads& grads);

}  // namespace ascendsim::kernels

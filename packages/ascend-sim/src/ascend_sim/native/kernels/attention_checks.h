// What a call of npu_fusion_attention must be. All of it is checked at the call: the task comes too
// late to tell who called, and reads through addresses alone.
#pragma once

#include "attention.h"

namespace ascendsim::kernels {

// The sizes of a call, whatever its layout. In TND the batch is the number of sequences, and the
// lengths are those of all sequences together.
struct Geometry {
  int64_t batch, heads, kv_heads, q_length, kv_length, head_size, value_head_size;
};

// Raises when inputs do not fit one another or an option cannot be.
Geometry check_attention(const AttentionInputs& inputs, const AttentionOptions& options);

}  // namespace ascendsim::kernels

// Reductions, in the order of the ranks.
#pragma once

#include <vector>

#include "types.h"

namespace ascendsim::hccl {

// Reduces `count` elements of every part into `to`: ((part 0, part 1), part 2), and so on, so that
// the result is the same in every run and on every rank. Types of 16 bits are combined in fp32 and
// rounded once. `to` may not overlap a part.
void Reduce(void* to, const std::vector<const char*>& parts, uint64_t count, DataType type,
            Reduction reduction);

}  // namespace ascendsim::hccl

// The collectives, and sends. torch_npu makes contiguous tensors, copies lists of tensors into flat
// ones and back, and calls these with counts in elements.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../runtime/common.h"
#include "../runtime/model.h"
#include "communicator.h"
#include "reduce.h"

namespace ascendsim::hccl {
namespace {

// [Note: how long collectives take]
//
// With n ranks, a link that takes `latency` for a step and `bandwidth` for bytes, and a tensor of B
// bytes (of a gather, the gathered one; of a scatter, the one that is scattered):
//
//   all_reduce                           2 (n-1) latency + 2 (n-1)/n B / bandwidth
//   reduce_scatter, all_gather, scatter    (n-1) latency +   (n-1)/n B / bandwidth
//   all_to_all                             (n-1) latency +   what a rank sends to others, or gets
//                                                            of them if that is more / bandwidth
//   broadcast, reduce                      (n-1) latency +           B / bandwidth
//   a send                                       latency +           B / bandwidth
//
// The first two are those of a ring. Its steps: P. Patarasuk, X. Yuan, "Bandwidth optimal
// all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009). The
// model of latency and bandwidth, the ring of all_gather, and all_to_all by pairs: R. Thakur,
// R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int.
// J. High Perform. Comput. Appl. 19 (2005). A broadcast is handed along the ring in many small
// parts. Parts of unequal sizes take as long as the largest. One rank alone takes no time. A model,
// and not an NPU's timing: which algorithm HCCL takes depends on sizes and on the network.
uint64_t Ring(const Communicator& communicator, uint64_t rounds, uint64_t largest) {
  const uint64_t steps = rounds * (communicator.size() - 1);
  return LinkNanoseconds(steps, static_cast<double>(steps) * static_cast<double>(largest));
}

// Of B bytes in n parts, which need not be whole ones.
uint64_t RingOf(const Communicator& communicator, uint64_t rounds, uint64_t bytes) {
  const uint64_t steps = rounds * (communicator.size() - 1);
  const double part = static_cast<double>(bytes) / communicator.size();
  return LinkNanoseconds(steps, static_cast<double>(steps) * part);
}

uint64_t Pipeline(const Communicator& communicator, uint64_t bytes) {
  const uint64_t steps = communicator.size() - 1;
  return LinkNanoseconds(steps, steps > 0 ? static_cast<double>(bytes) : 0);
}

Access Reads(const void* from, uint64_t bytes) { return Access::Of(from, bytes, false); }
Access Writes(const void* to, uint64_t bytes) { return Access::Of(to, bytes, true); }

// What every function checks first.
struct Checked {
  std::shared_ptr<Communicator> communicator;
  size_t size = 0;  // of an element
  int code = kSuccess;
};

Checked Check(const char* function, void* handle, int32_t type) {
  Checked checked = {Communicator::Find(handle), SizeOf(type)};
  if (!checked.communicator) {
    checked.code = Fail(kBadArgument, std::string(function) + ": unknown communicator");
  } else if (checked.size == 0) {
    checked.code = Fail(kBadArgument, std::string(function) + ": data type " +
                                          std::to_string(type) + " is not simulated");
  }
  return checked;
}

void Copy(void* to, const void* from, uint64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

// Reduces the elements from `first` on of all parts.
void ReduceParts(void* to, const Parts& parts, uint64_t first, const Call& call) {
  if (call.count == 0) return;
  std::vector<const char*> from;
  for (const View& part : parts) from.push_back(part.data() + first * SizeOf(call.type));
  Reduce(to, from, call.count, call.type, call.reduction);
}

// The counts and displacements of one rank, in bytes.
struct Split {
  std::vector<uint64_t> bytes, offsets;

  Split(const void* counts, const void* displacements, uint32_t ranks, size_t size)
      : Split(ranks) {
    for (uint32_t i = 0; i < ranks; ++i) {
      bytes[i] = static_cast<const uint64_t*>(counts)[i] * size;
      offsets[i] = static_cast<const uint64_t*>(displacements)[i] * size;
    }
  }
  // One part behind the other; of rank i, counts[i * stride] elements.
  Split(const uint64_t* counts, uint32_t stride, uint32_t ranks, size_t size) : Split(ranks) {
    uint64_t next = 0;
    for (uint32_t i = 0; i < ranks; ++i) {
      bytes[i] = counts[uint64_t{i} * stride] * size;
      offsets[i] = next;
      next += bytes[i];
    }
  }
  Split(uint64_t each, uint32_t ranks) : Split(ranks) {
    for (uint32_t i = 0; i < ranks; ++i) {
      bytes[i] = each;
      offsets[i] = each * i;
    }
  }

  uint64_t Largest() const { return *std::max_element(bytes.begin(), bytes.end()); }

 private:
  explicit Split(uint32_t ranks) : bytes(ranks), offsets(ranks) {}
};

// What a rank sends to others, or gets of them if that is more.
uint64_t PairsOf(const Communicator& communicator, const Split& sent, const Split& received) {
  uint64_t out = 0, in = 0;
  for (uint32_t i = 0; i < communicator.size(); ++i) {
    if (i == communicator.rank()) continue;
    out += sent.bytes[i];
    in += received.bytes[i];
  }
  return LinkNanoseconds(communicator.size() - 1, static_cast<double>(std::max(out, in)));
}

void Add(std::vector<Access>& accesses, const void* of, const Split& split, bool writes) {
  for (uint32_t i = 0; i < split.bytes.size(); ++i) {
    accesses.push_back(
        Access::Of(static_cast<const char*>(of) + split.offsets[i], split.bytes[i], writes));
  }
}

// What a rank sends is what others count on.
void CheckLength(uint32_t rank, uint64_t sent, uint64_t expected) {
  if (sent == expected) return;
  throw Failure(kRemote, "rank " + std::to_string(rank) + " sends " + std::to_string(sent) +
                             " bytes, and " + std::to_string(expected) + " are expected");
}

// A part of all-to-all is the lengths of its pieces, and the pieces, by the rank they are for.
int AllToAll(Communicator& communicator, const Call& call, const void* from, const Split& sent,
             const void* to, const Split& received, void* stream) {
  const uint32_t ranks = communicator.size(), self = communicator.rank();
  // The task refers to it.
  const auto lengths = std::make_shared<std::vector<uint64_t>>(sent.bytes);
  std::vector<Piece> pieces = {{lengths->data(), ranks * sizeof(uint64_t)}};
  for (uint32_t i = 0; i < ranks; ++i) {
    pieces.push_back({static_cast<const char*>(from) + sent.offsets[i], sent.bytes[i]});
  }
  auto* result = static_cast<char*>(const_cast<void*>(to));
  auto use = [=](const Parts& parts) {
    for (uint32_t i = 0; i < lengths->size(); ++i) {
      const auto* theirs = reinterpret_cast<const uint64_t*>(parts[i].data());
      CheckLength(i, theirs[self], received.bytes[i]);
      const char* piece = parts[i].data() + ranks * sizeof(uint64_t);
      for (uint32_t before = 0; before < self; ++before) piece += theirs[before];
      Copy(result + received.offsets[i], piece, received.bytes[i]);
    }
  };
  std::vector<Access> accesses;
  Add(accesses, from, sent, false);
  Add(accesses, to, received, true);
  return communicator.Exchange({call, std::move(pieces), std::move(use), std::move(accesses),
                                PairsOf(communicator, sent, received)},
                               stream);
}

// HcclSendRecvItem.
struct Item {
  int32_t kind;  // 0: send, 1: receive
  void* buffer;
  uint64_t count;
  int32_t type;
  uint32_t peer;
};

int Begin(const char* name, const std::vector<Item>& items, void* handle, void* stream) {
  std::vector<hccl::Transfer> transfers;
  std::shared_ptr<Communicator> communicator;
  for (const auto& [kind, buffer, count, type, peer] : items) {
    const Checked checked = Check(name, handle, type);
    if (checked.code) return checked.code;
    communicator = checked.communicator;
    if (peer >= communicator->size()) {
      return Fail(kBadArgument, std::string(name) + ": there is no rank " + std::to_string(peer));
    }
    transfers.push_back({kind == 1, buffer, count, static_cast<DataType>(type), peer});
  }
  return communicator ? communicator->Batch(name, transfers, stream) : kSuccess;
}

}  // namespace
}  // namespace ascendsim::hccl

using namespace ascendsim;
using namespace ascendsim::hccl;

// Reductions. A rank sends all it has, and reduces what it is to get.
ASCENDSIM_API int HcclAllReduce(void* from, void* to, uint64_t count, int type, int reduction,
                                void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclAllReduce", handle, type);
  if (code) return code;
  const Call call = {"all_reduce", DataType{type}, count, Reduction{reduction}};
  auto use = [=](const Parts& parts) { ReduceParts(to, parts, 0, call); };
  const uint64_t bytes = count * size;
  return communicator->Exchange({call, {{from, bytes}}, use,
                                 {Reads(from, bytes), Writes(to, bytes)},
                                 RingOf(*communicator, 2, bytes)},
                                stream);
}

ASCENDSIM_API int HcclReduce(void* from, void* to, uint64_t count, int type, int reduction,
                             uint32_t root, void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclReduce", handle, type);
  if (code) return code;
  const Call call = {"reduce", DataType{type}, count, Reduction{reduction},
                     static_cast<int32_t>(root)};
  const bool gets = communicator->rank() == root;
  auto use = [=](const Parts& parts) {
    if (gets) ReduceParts(to, parts, 0, call);
  };
  const uint64_t bytes = count * size;
  return communicator->Exchange({call, {{from, bytes}}, use,
                                 {Reads(from, bytes), Writes(to, gets ? bytes : 0)},
                                 Pipeline(*communicator, bytes)},
                                stream);
}

ASCENDSIM_API int HcclReduceScatter(void* from, void* to, uint64_t count, int type, int reduction,
                                    void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclReduceScatter", handle, type);
  if (code) return code;
  const Call call = {"reduce_scatter", DataType{type}, count, Reduction{reduction}};
  const uint64_t first = count * communicator->rank();
  auto use = [=](const Parts& parts) { ReduceParts(to, parts, first, call); };
  const uint64_t bytes = count * size * communicator->size();
  return communicator->Exchange({call, {{from, bytes}}, use,
                                 {Reads(from, bytes), Writes(to, count * size)},
                                 Ring(*communicator, 1, count * size)},
                                stream);
}

// From one to all, and from all to all. The root of a broadcast and of a scatter alone sends.
ASCENDSIM_API int HcclBroadcast(void* buffer, uint64_t count, int type, uint32_t root, void* handle,
                                void* stream) {
  const auto [communicator, size, code] = Check("HcclBroadcast", handle, type);
  if (code) return code;
  const Call call = {"broadcast", DataType{type}, count, kNone, static_cast<int32_t>(root)};
  const bool sends = communicator->rank() == root;
  const uint64_t bytes = count * size;
  auto use = [=](const Parts& parts) {
    if (!sends) Copy(buffer, parts[root].data(), bytes);
  };
  return communicator->Exchange({call, {{buffer, sends ? bytes : 0}}, use,
                                 {Access::Of(buffer, bytes, !sends)},
                                 Pipeline(*communicator, bytes)},
                                stream);
}

ASCENDSIM_API int HcclScatter(void* from, void* to, uint64_t count, int type, uint32_t root,
                              void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclScatter", handle, type);
  if (code) return code;
  const Call call = {"scatter", DataType{type}, count, kNone, static_cast<int32_t>(root)};
  const uint64_t bytes = count * size;
  const uint32_t self = communicator->rank();
  auto use = [=](const Parts& parts) { Copy(to, parts[root].data() + self * bytes, bytes); };
  const uint64_t sent = self == root ? bytes * communicator->size() : 0;
  return communicator->Exchange({call, {{from, sent}}, use,
                                 {Reads(from, sent), Writes(to, bytes)},
                                 Ring(*communicator, 1, bytes)},
                                stream);
}

ASCENDSIM_API int HcclAllGather(void* from, void* to, uint64_t count, int type, void* handle,
                                void* stream) {
  const auto [communicator, size, code] = Check("HcclAllGather", handle, type);
  if (code) return code;
  const Call call = {"all_gather", DataType{type}, count};
  const uint64_t bytes = count * size;
  auto use = [=](const Parts& parts) {
    char* next = static_cast<char*>(to);
    for (const View& part : parts) {
      Copy(next, part.data(), bytes);
      next += bytes;
    }
  };
  const uint64_t gathered = bytes * communicator->size();
  return communicator->Exchange({call, {{from, bytes}}, use,
                                 {Reads(from, bytes), Writes(to, gathered)},
                                 Ring(*communicator, 1, bytes)},
                                stream);
}

// Parts of different lengths, which every rank knows.
ASCENDSIM_API int HcclAllGatherV(void* from, uint64_t count, void* to, const void* counts,
                                 const void* displacements, int type, void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclAllGatherV", handle, type);
  if (code) return code;
  const Split split(counts, displacements, communicator->size(), size);
  auto use = [=, size = size](const Parts& parts) {
    for (uint32_t i = 0; i < parts.size(); ++i) {
      CheckLength(i, parts[i].bytes(), split.bytes[i]);
      Copy(static_cast<char*>(to) + split.offsets[i], parts[i].data(), split.bytes[i]);
    }
  };
  const uint64_t bytes = count * size;
  std::vector<Access> accesses = {Reads(from, bytes)};
  Add(accesses, to, split, true);
  return communicator->Exchange({{"all_gather", DataType{type}, 0}, {{from, bytes}}, use, accesses,
                                 Ring(*communicator, 1, split.Largest())},
                                stream);
}

ASCENDSIM_API int HcclReduceScatterV(void* from, const void* counts, const void* displacements,
                                     void* to, uint64_t count, int type, int reduction,
                                     void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclReduceScatterV", handle, type);
  if (code) return code;
  const Split split(counts, displacements, communicator->size(), size);
  const uint32_t self = communicator->rank();
  // A rank posts its parts without what may lie between them, for others' may lie elsewhere.
  std::vector<Piece> pieces;
  uint64_t first = 0, bytes = 0;
  for (uint32_t i = 0; i < split.bytes.size(); ++i) {
    pieces.push_back({static_cast<const char*>(from) + split.offsets[i], split.bytes[i]});
    if (i < self) first += split.bytes[i];
    bytes += split.bytes[i];
  }
  const Call call = {"reduce_scatter", DataType{type}, count, Reduction{reduction}};
  const Call told = {"reduce_scatter", DataType{type}, 0, Reduction{reduction}};
  auto use = [=, size = size](const Parts& parts) {
    CheckLength(self, split.bytes[self], count * size);
    for (uint32_t i = 0; i < parts.size(); ++i) CheckLength(i, parts[i].bytes(), bytes);
    ReduceParts(to, parts, first / size, call);
  };
  std::vector<Access> accesses = {Writes(to, count * size)};
  Add(accesses, from, split, false);
  return communicator->Exchange(
      {told, std::move(pieces), use, accesses, Ring(*communicator, 1, split.Largest())}, stream);
}

ASCENDSIM_API int HcclAlltoAll(const void* from, uint64_t count, int type, const void* to, uint64_t,
                               int, void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclAlltoAll", handle, type);
  if (code) return code;
  const Split split(count * size, communicator->size());
  const Call call = {"all_to_all", DataType{type}, count};
  return AllToAll(*communicator, call, from, split, to, split, stream);
}

// Each rank's own counts and displacements. They are read now: torch_npu frees them.
ASCENDSIM_API int HcclAlltoAllV(const void* from, const void* counts, const void* displacements,
                                int type, const void* to, const void* their_counts,
                                const void* their_displacements, int, void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclAlltoAllV", handle, type);
  if (code) return code;
  const uint32_t ranks = communicator->size();
  const Split sent(counts, displacements, ranks, size);
  const Split received(their_counts, their_displacements, ranks, size);
  const Call call = {"all_to_all", DataType{type}, 0};
  return AllToAll(*communicator, call, from, sent, to, received, stream);
}

// Every rank knows all counts: `counts[i * ranks + j]` elements from i to j, one part behind
// another.
ASCENDSIM_API int HcclAlltoAllVC(const void* from, const void* counts, int type, const void* to,
                                 int, void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclAlltoAllVC", handle, type);
  if (code) return code;
  const uint32_t ranks = communicator->size(), self = communicator->rank();
  const auto* matrix = static_cast<const uint64_t*>(counts);
  const Split sent(matrix + uint64_t{self} * ranks, 1, ranks, size);
  const Split received(matrix + self, ranks, ranks, size);
  const Call call = {"all_to_all", DataType{type}, 0};
  return AllToAll(*communicator, call, from, sent, to, received, stream);
}

// Sends and receives. Between two ranks they match in order; there are no tags.
ASCENDSIM_API int HcclSend(void* buffer, uint64_t count, int type, uint32_t peer, void* handle,
                           void* stream) {
  return Begin("send", {{0, buffer, count, type, peer}}, handle, stream);
}

ASCENDSIM_API int HcclRecv(void* buffer, uint64_t count, int type, uint32_t peer, void* handle,
                           void* stream) {
  return Begin("recv", {{1, buffer, count, type, peer}}, handle, stream);
}

// batch_isend_irecv: all begin together, so that in a ring nobody waits for anybody.
ASCENDSIM_API int HcclBatchSendRecv(const void* items, uint32_t count, void* handle, void* stream) {
  const auto* first = static_cast<const Item*>(items);
  return Begin("batch_isend_irecv", {first, first + count}, handle, stream);
}

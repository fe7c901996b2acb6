// The collectives, and sends. torch_npu makes contiguous tensors, copies lists of tensors into flat
// ones and back, and calls these with counts in elements.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../runtime/common.h"
#include "communicator.h"
#include "reduce.h"

namespace ascendsim::hccl {
namespace {

using Parts = Communicator::Parts;

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
  Split(uint64_t each, uint32_t ranks) : Split(ranks) {
    for (uint32_t i = 0; i < ranks; ++i) {
      bytes[i] = each;
      offsets[i] = each * i;
    }
  }

 private:
  explicit Split(uint32_t ranks) : bytes(ranks), offsets(ranks) {}
};

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
      if (theirs[self] != received.bytes[i]) {
        throw Failure(kRemote, "rank " + std::to_string(i) + " sends " +
                                   std::to_string(theirs[self]) + " bytes, and " +
                                   std::to_string(received.bytes[i]) + " are expected");
      }
      const char* piece = parts[i].data() + ranks * sizeof(uint64_t);
      for (uint32_t before = 0; before < self; ++before) piece += theirs[before];
      Copy(result + received.offsets[i], piece, received.bytes[i]);
    }
  };
  return communicator.Exchange(call, std::move(pieces), std::move(use), stream);
}

// HcclSendRecvItem.
struct Item {
  int32_t kind;  // 0: send, 1: receive
  void* buffer;
  uint64_t count;
  int32_t type;
  uint32_t peer;
};

int Transfer(const char* name, const std::vector<Item>& items, void* handle, void* stream) {
  std::vector<Communicator::Transfer> transfers;
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
  return communicator->Exchange(call, {{from, count * size}}, use, stream);
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
  return communicator->Exchange(call, {{from, count * size}}, use, stream);
}

ASCENDSIM_API int HcclReduceScatter(void* from, void* to, uint64_t count, int type, int reduction,
                                    void* handle, void* stream) {
  const auto [communicator, size, code] = Check("HcclReduceScatter", handle, type);
  if (code) return code;
  const Call call = {"reduce_scatter", DataType{type}, count, Reduction{reduction}};
  const uint64_t first = count * communicator->rank();
  auto use = [=](const Parts& parts) { ReduceParts(to, parts, first, call); };
  const uint64_t bytes = count * size * communicator->size();
  return communicator->Exchange(call, {{from, bytes}}, use, stream);
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
  return communicator->Exchange(call, {{buffer, sends ? bytes : 0}}, use, stream);
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
  return communicator->Exchange(call, {{from, sent}}, use, stream);
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
  return communicator->Exchange(call, {{from, bytes}}, use, stream);
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

// Sends and receives. Between two ranks they match in order; there are no tags.
ASCENDSIM_API int HcclSend(void* buffer, uint64_t count, int type, uint32_t peer, void* handle,
                           void* stream) {
  return Transfer("send", {{0, buffer, count, type, peer}}, handle, stream);
}

ASCENDSIM_API int HcclRecv(void* buffer, uint64_t count, int type, uint32_t peer, void* handle,
                           void* stream) {
  return Transfer("recv", {{1, buffer, count, type, peer}}, handle, stream);
}

// batch_isend_irecv: all begin together, so that in a ring nobody waits for anybody.
ASCENDSIM_API int HcclBatchSendRecv(const void* items, uint32_t count, void* handle, void* stream) {
  const auto* first = static_cast<const Item*>(items);
  return Transfer("batch_isend_irecv", {first, first + count}, handle, stream);
}

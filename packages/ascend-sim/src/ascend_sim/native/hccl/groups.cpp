// Making and ending communicators.
//
// torch_npu makes a communicator when a group is first used: one of its ranks calls
// HcclGetRootInfo, the others get the answer through the store, and all call HcclCommInitRootInfo,
// which returns when all are there. Each group has one, and each pair of ranks that sends to one
// another.
#include <unistd.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>

#include "../runtime/common.h"
#include "communicator.h"

namespace ascendsim::hccl {
namespace {

// HcclRootInfo: 4108 bytes that only we read.
struct RootInfo {
  static constexpr size_t kBytes = 4108;
  static constexpr uint64_t kMark = 0x6d69'7364'6e65'6373;

  uint64_t mark;
  Process owner;
  int board;
};

// The boards that this process has made and that are not complete yet, by descriptor.
struct Boards {
  std::mutex mutex;
  std::unordered_set<int> open;

  static Boards& Get() {
    static auto* boards = new Boards;
    return *boards;
  }
};

void CloseBoard(const RootInfo& info) {
  if (info.owner.number != getpid()) return;
  const std::lock_guard lock(Boards::Get().mutex);
  if (Boards::Get().open.erase(info.board)) close(info.board);
}

constexpr size_t kNameLength = 128;

// HcclCommConfig, as far as we read it.
struct Config {
  char header[24];
  uint32_t buffer_size, deterministic;
  char name[kNameLength];  // of the process group; empty for a pair that sends
};
// So many of its members are understood, the first ones: torch_npu gives a name from 3 on.
constexpr uint32_t kMembersUnderstood = 3;

int Join(uint32_t size, const void* root, uint32_t rank, std::string name, void** handle) {
  RootInfo info;
  std::memcpy(&info, root, sizeof info);
  const std::string place = "rank " + std::to_string(rank) + " of " + std::to_string(size);
  if (info.mark != RootInfo::kMark || rank >= size) {
    return Fail(kBadArgument, "making a group: " + place + " cannot join with what it was given");
  }
  if (name.empty()) {
    name = "simulated_" + std::to_string(info.owner.number) + "_" + std::to_string(info.board);
  }
  try {
    auto group = std::make_unique<Group>(info.owner, info.board, size, rank);
    CloseBoard(info);
    *handle = Communicator::Keep(std::make_shared<Communicator>(name, std::move(group)));
    return kSuccess;
  } catch (const Failure& failure) {
    CloseBoard(info);
    return Fail(failure.code, failure.Text("making the group " + name + " on " + place));
  }
}

}  // namespace
}  // namespace ascendsim::hccl

using namespace ascendsim;
using namespace ascendsim::hccl;

ASCENDSIM_API int HcclGetRootInfo(void* out) {
  try {
    const RootInfo info = {RootInfo::kMark, Process::Self(), MakeMemory("ascendsim-board")};
    const std::lock_guard lock(Boards::Get().mutex);
    Boards::Get().open.insert(info.board);
    std::memset(out, 0, RootInfo::kBytes);
    std::memcpy(out, &info, sizeof info);
    return kSuccess;
  } catch (const Failure& failure) {
    return Fail(failure.code, failure.Text("HcclGetRootInfo"));
  }
}

ASCENDSIM_API int HcclCommInitRootInfo(uint32_t size, const void* root, uint32_t rank,
                                       void** handle) {
  return Join(size, root, rank, {}, handle);
}

// Of the configuration only the name matters here.
ASCENDSIM_API int HcclCommInitRootInfoConfig(uint32_t size, const void* root, uint32_t rank,
                                             const void* config, void** handle) {
  return Join(size, root, rank, static_cast<const Config*>(config)->name, handle);
}

// Operations that are still pending run when the schedule or a peer wants them.
ASCENDSIM_API int HcclCommDestroy(void* handle) {
  Communicator::Forget(handle);
  return kSuccess;
}

// What is called between them begins together. Collectives need no help for that: each is a task.
ASCENDSIM_API int HcclGroupStart() {
  Communicator::StartGroup();
  return kSuccess;
}
ASCENDSIM_API int HcclGroupEnd() { return Communicator::EndGroup(); }

ASCENDSIM_API int HcclGetCommName(void* handle, char* name) {
  const auto communicator = Communicator::Find(handle);
  if (!communicator) return Fail(kBadArgument, "HcclGetCommName: unknown communicator");
  std::strncpy(name, communicator->name().c_str(), kNameLength - 1);
  name[kNameLength - 1] = '\0';
  return kSuccess;
}

// torch_npu's watchdog asks, and ends the process when the answer is an error. A failure is
// reported by the next synchronisation instead, with its text.
ASCENDSIM_API int HcclGetCommAsyncError(void*, int* error) {
  *error = kSuccess;
  return kSuccess;
}

ASCENDSIM_API uint32_t HcclGetCommConfigCapability() { return kMembersUnderstood; }

// Asks for determinism, which is always given.
ASCENDSIM_API int HcclSetConfig(int, int) { return kSuccess; }

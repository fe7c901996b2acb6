// Copies, with a bandwidth and a latency per direction.
#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "common.h"
#include "faults.h"
#include "memory.h"
#include "model.h"
#include "scheduler.h"

namespace ascendsim {
namespace {

enum Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice, kHostToHost };

Direction DirectionOf(const void* to, const void* from) {
  const bool to_device = Memory::Get().Where(to) == Home::kDevice;
  const bool from_device = Memory::Get().Where(from) == Home::kDevice;
  if (to_device) return from_device ? kDeviceToDevice : kHostToDevice;
  return from_device ? kDeviceToHost : kHostToHost;
}

AscendsimKind KindOf(Direction direction) {
  constexpr std::array kKinds = {ASCENDSIM_KIND_H2D, ASCENDSIM_KIND_D2H, ASCENDSIM_KIND_D2D,
                                 ASCENDSIM_KIND_HOST};
  return kKinds[direction];
}

// A direction has one engine: its copies follow one another. The bytes move at the end, so that who
// reads too early reads the old ones. (In `timed` the clock moves, and nobody sleeps.)
void Move(void* to, const void* from, size_t bytes, Direction direction) {
  static auto* engines = new std::array<std::mutex, 4>;
  const uint64_t duration = CopyNanoseconds(KindOf(direction), bytes);
  if (duration > 0 && Settings().schedule != ASCENDSIM_TIMED) {
    const std::lock_guard engine((*engines)[direction]);
    std::this_thread::sleep_for(std::chrono::nanoseconds(duration));
  }
  std::memmove(to, from, bytes);
}

void CountCopy(Direction direction, size_t bytes) {
  using C = AscendsimCounters;
  if (direction == kHostToHost) return;
  constexpr std::array kBytes = {&C::h2d_bytes, &C::d2h_bytes, &C::d2d_bytes};
  constexpr std::array kCopies = {&C::h2d_copies, &C::d2h_copies, &C::d2d_copies};
  Count(kBytes[direction], bytes);
  Count(kCopies[direction]);
}

// What both kinds of copy begin with.
int Begin(const StreamRef& stream, Direction direction, size_t room, size_t bytes) {
  if (HasStopped(stream->device)) return ErrorOf(stream->device);
  if (bytes > room) return Fail(kBadParameter, "a copy is larger than its destination");
  if (Strikes(ASCENDSIM_FAULT_COPY)) return Fail(kInternal, "injected fault: copy");
  CountCopy(direction, bytes);
  return kOk;
}

int WaitFor(const StreamRef& stream) {
  Count(&AscendsimCounters::synchronisations);
  Scheduler::Get().Await(stream);
  return ErrorOf(stream->device);
}

const char* NameOf(Direction direction) {
  constexpr std::array kNames = {"copy h2d", "copy d2h", "copy d2d", "copy h2h"};
  return kNames[direction];
}

void SubmitFill(const StreamRef& stream, void* to, int value, size_t bytes) {
  auto fill = [=] { std::memset(to, value, bytes); };
  Scheduler::Get().Submit(stream, {.name = "memset",
                                   .run = std::move(fill),
                                   .after = {},
                                   .bytes = bytes,
                                   .accesses = {Access::Of(to, bytes, true)}});
}

void SubmitCopy(const StreamRef& stream, void* to, const void* from, size_t bytes,
                Direction direction) {
  const bool fails = Strikes(ASCENDSIM_FAULT_LATE_COPY);
  auto move = [=, device = stream->device] {
    if (!fails) return Move(to, from, bytes, direction);
    ReportError(device, std::string(NameOf(direction)) + ": injected fault: the copy failed");
  };
  Scheduler::Get().Submit(
      stream, {.name = NameOf(direction),
               .run = std::move(move),
               .after = {},
               .bytes = bytes,
               .kind = KindOf(direction),
               .accesses = {Access::Of(from, bytes, false), Access::Of(to, bytes, true)}});
}

}  // namespace
}  // namespace ascendsim

using namespace ascendsim;

// The host waits, and for the default stream first. torch_npu copies so where non_blocking is not
// asked for, after it has synchronised the stream of the copy itself.
ASCENDSIM_API int aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int) {
  const Direction direction = DirectionOf(to, from);
  const auto stream = Scheduler::Get().DefaultStream(CurrentDevice());
  if (const int code = Begin(stream, direction, room, bytes)) return code;
  SubmitCopy(stream, to, from, bytes, direction);
  return WaitFor(stream);
}

// Ordered on the stream. With pageable memory at the host's end it returns when the copy is done,
// as the real one, which has to stage such memory.
ASCENDSIM_API int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int,
                                   void* handle) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!stream) return Fail(kBadParameter, "aclrtMemcpyAsync: unknown stream");
  const Direction direction = DirectionOf(to, from);
  if (const int code = Begin(stream, direction, room, bytes)) return code;
  SubmitCopy(stream, to, from, bytes, direction);
  const void* host = direction == kHostToDevice ? from : to;
  const bool crosses = direction == kHostToDevice || direction == kDeviceToHost;
  if (crosses && Memory::Get().Where(host) == Home::kPageable) return WaitFor(stream);
  return kOk;
}

ASCENDSIM_API int aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from,
                                                size_t bytes, int kind, void* stream) {
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

// Several copies in one call; torch_npu's foreach copy looks these up. Attributes are ignored.
ASCENDSIM_API int aclrtMemcpyBatch(void** to, size_t* rooms, void** from, size_t* bytes,
                                   size_t count, void*, size_t*, size_t, size_t*) {
  for (size_t i = 0; i < count; ++i) {
    if (const int code = aclrtMemcpy(to[i], rooms[i], from[i], bytes[i], 0)) return code;
  }
  return kOk;
}

ASCENDSIM_API int aclrtMemcpyBatchAsync(void** to, size_t* rooms, void** from, size_t* bytes,
                                        size_t count, void*, size_t*, size_t, size_t*,
                                        void* stream) {
  for (size_t i = 0; i < count; ++i) {
    const int code = aclrtMemcpyAsync(to[i], rooms[i], from[i], bytes[i], 0, stream);
    if (code) return code;
  }
  return kOk;
}

ASCENDSIM_API int aclrtMemset(void* to, size_t room, int value, size_t bytes) {
  if (bytes > room) return Fail(kBadParameter, "a memset is larger than its destination");
  const auto stream = Scheduler::Get().DefaultStream(CurrentDevice());
  SubmitFill(stream, to, value, bytes);
  return WaitFor(stream);
}

ASCENDSIM_API int aclrtMemsetAsync(void* to, size_t room, int value, size_t bytes, void* handle) {
  if (bytes > room) return Fail(kBadParameter, "a memset is larger than its destination");
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!stream) return Fail(kBadParameter, "aclrtMemsetAsync: unknown stream");
  if (HasStopped(stream->device)) return ErrorOf(stream->device);
  SubmitFill(stream, to, value, bytes);
  return kOk;
}

#include "faults.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "memory.h"
#include "scheduler.h"
#include "tasks.h"

namespace ascendsim {
namespace {

constexpr size_t kFaults = 4;

struct Failure {
  int device;
  std::string text;
};

struct Books {
  std::mutex mutex;
  AscendsimCounters counters = {};
  std::array<uint64_t, kFaults> remaining = {};  // occurrences until the fault strikes; 0: disarmed
  std::deque<Failure> failures;
};

Books& TheBooks() {
  static auto* books = new Books;
  return *books;
}

}  // namespace

void Count(uint64_t AscendsimCounters::* counter, uint64_t amount) {
  const std::lock_guard lock(TheBooks().mutex);
  TheBooks().counters.*counter += amount;
}

bool Strikes(AscendsimFault fault) {
  const std::lock_guard lock(TheBooks().mutex);
  uint64_t& remaining = TheBooks().remaining[fault];
  if (remaining == 0 || --remaining > 0) return false;
  ++TheBooks().counters.faults_injected;
  return true;
}

void ReportError(int device, std::string text) {
  const std::lock_guard lock(TheBooks().mutex);
  TheBooks().failures.push_back({device, std::move(text)});
}

int TakeErrorOf(int device) {
  const std::lock_guard lock(TheBooks().mutex);
  auto& failures = TheBooks().failures;
  const auto found = std::find_if(failures.begin(), failures.end(),
                                  [device](const auto& f) { return f.device == device; });
  if (found == failures.end()) return kOk;
  const std::string text = "an asynchronous kernel failed: " + found->text;
  failures.erase(found);
  return Fail(kKernelFailed, text);
}

}  // namespace ascendsim

using namespace ascendsim;

void ascendsim_counters(AscendsimCounters* counters) {
  {
    const std::lock_guard lock(TheBooks().mutex);
    *counters = TheBooks().counters;
  }
  counters->tasks_submitted = Scheduler::Get().Submitted();
  counters->tasks_pending = Scheduler::Get().Pending();
  counters->device_bytes = Memory::Get().UsedInAll();
  counters->pinned_bytes = Memory::Get().Pinned();
}

uint64_t ascendsim_device_bytes(uint32_t device) {
  return Memory::Get().Used(static_cast<int>(device));
}

uint64_t ascendsim_inject(int32_t fault, uint64_t nth) {
  if (fault < 0 || fault >= static_cast<int32_t>(kFaults)) return 0;
  const std::lock_guard lock(TheBooks().mutex);
  return std::exchange(TheBooks().remaining[fault], nth);
}

void ascendsim_drain() { Scheduler::Get().AwaitAll(); }

int ascendsim_take_error(char* text, uint64_t size) {
  const std::lock_guard lock(TheBooks().mutex);
  auto& failures = TheBooks().failures;
  if (failures.empty()) return 0;
  if (size > 0) {
    std::strncpy(text, failures.front().text.c_str(), size - 1);
    text[size - 1] = '\0';
  }
  failures.pop_front();
  return 1;
}

int ascendsim_launch(void* stream, const AscendsimKernel* kernel) {
  const auto queue = Scheduler::Get().FindStream(stream);
  if (!queue) return Fail(kBadParameter, "ascendsim_launch: unknown stream");
  std::function<void()> run;
  if (kernel->run) run = [run = kernel->run, argument = kernel->argument] { run(argument); };
  std::vector<Access> accesses;
  for (const auto* a = kernel->accesses; a != kernel->accesses + kernel->access_count; ++a) {
    accesses.push_back(Access::Of(a->begin, a->bytes, a->writes != 0));
  }
  Scheduler::Get().Submit(queue, {.name = kernel->name,
                                  .run = std::move(run),
                                  .after = {},
                                  .flops = kernel->flops,
                                  .bytes = kernel->bytes,
                                  .flop_bytes = kernel->flop_bytes,
                                  .accesses = std::move(accesses)});
  return kOk;
}

void ascendsim_settle(void* stream) {
  if (const auto queue = Scheduler::Get().FindStream(stream)) Scheduler::Get().Settle(queue);
}

int ascendsim_kernel_begins(const char*) {
  Count(&AscendsimCounters::kernels);
  return Strikes(ASCENDSIM_FAULT_KERNEL);
}

int ascendsim_allocation_begins(int32_t fault) {
  const bool pinned = fault == ASCENDSIM_FAULT_PINNED_ALLOCATION;
  Count(pinned ? &AscendsimCounters::pinned_allocations : &AscendsimCounters::device_allocations);
  return Strikes(static_cast<AscendsimFault>(fault));
}

void ascendsim_report_error(void* stream, const char* text) {
  const auto queue = Scheduler::Get().FindStream(stream);
  ReportError(queue ? queue->device : CurrentDevice(), text);
}

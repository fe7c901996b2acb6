#include "faults.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "memory.h"
#include "scheduler.h"
#include "tasks.h"

namespace ascendsim {
namespace {

constexpr size_t kFaults = 6;

struct Failure {
  int device;
  std::string text;
  bool told = false;  // to the program
};

struct Books {
  std::mutex mutex;
  AscendsimCounters counters = {};
  std::array<uint64_t, kFaults> remaining = {};  // occurrences until the fault strikes; 0: disarmed
  std::array<bool, kFaults> lasts = {};          // it has struck, and strikes until it is disarmed
  std::deque<Failure> failures;
  std::array<bool, kMaxDevices> stops = {};  // by device: asked to stop on a failure

  // The oldest failure of a device, or the end.
  std::deque<Failure>::iterator Find(int device) {
    return std::find_if(failures.begin(), failures.end(),
                        [device](const Failure& f) { return f.device == device; });
  }
};

Books& TheBooks() {
  static auto* books = new Books;
  return *books;
}

void CopyText(char* to, uint64_t size, const std::string& text) {
  if (size == 0) return;
  std::strncpy(to, text.c_str(), size - 1);
  to[size - 1] = '\0';
}

}  // namespace

void Count(uint64_t AscendsimCounters::* counter, uint64_t amount) {
  const std::lock_guard lock(TheBooks().mutex);
  TheBooks().counters.*counter += amount;
}

bool Strikes(AscendsimFault fault) {
  Books& books = TheBooks();
  const std::lock_guard lock(books.mutex);
  if (books.lasts[fault]) return true;
  uint64_t& remaining = books.remaining[fault];
  if (remaining == 0 || --remaining > 0) return false;
  ++books.counters.faults_injected;
  books.lasts[fault] = fault == ASCENDSIM_FAULT_DEVICE_SEGMENT;
  return true;
}

void StopOnFailure(int device) {
  const std::lock_guard lock(TheBooks().mutex);
  TheBooks().stops[device] = true;
}

void ReportError(int device, std::string text) {
  Books& books = TheBooks();
  const std::lock_guard lock(books.mutex);
  if (books.stops[device] && books.Find(device) != books.failures.end()) return;
  books.failures.push_back({device, std::move(text)});
}

bool HasStopped(int device) {
  Books& books = TheBooks();
  const std::lock_guard lock(books.mutex);
  return books.stops[device] && books.Find(device) != books.failures.end();
}

void ResetFailures(int device) {
  const std::lock_guard lock(TheBooks().mutex);
  std::erase_if(TheBooks().failures, [device](const Failure& f) { return f.device == device; });
}

int ErrorOf(int device) {
  Books& books = TheBooks();
  const std::lock_guard lock(books.mutex);
  const auto found = books.Find(device);
  if (found == books.failures.end()) return kOk;
  const std::string text = found->text;
  if (!books.stops[device]) {
    books.failures.erase(found);
    return Fail(kKernelFailed, "an asynchronous task failed: " + text);
  }
  found->told = true;
  return Fail(kKernelFailed, "an asynchronous task failed, and device " + std::to_string(device) +
                                 " has stopped until it is reset: " + text);
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
  TheBooks().lasts[fault] = false;
  return std::exchange(TheBooks().remaining[fault], nth);
}

void ascendsim_drain() { Scheduler::Get().AwaitAll(); }

int ascendsim_take_error(char* text, uint64_t size) {
  const std::lock_guard lock(TheBooks().mutex);
  const auto failures = std::exchange(TheBooks().failures, {});
  const auto untold =
      std::find_if(failures.begin(), failures.end(), [](const Failure& f) { return !f.told; });
  if (untold == failures.end()) return 0;
  CopyText(text, size, untold->text);
  return 1;
}

int ascendsim_error_of(void* stream, char* text, uint64_t size) {
  const auto queue = Scheduler::Get().FindStream(stream);
  const int code = ErrorOf(queue ? queue->device : CurrentDevice());
  if (code) CopyText(text, size, TakeFailure());
  return code;
}

int ascendsim_launch(void* stream, const AscendsimKernel* kernel) {
  const auto queue = Scheduler::Get().FindStream(stream);
  if (!queue) return Fail(kBadParameter, "ascendsim_launch: unknown stream");
  std::function<void()> run;
  if (kernel->run) {
    // Shared, since a function must be one that can be copied; it is let go of with the task.
    const std::shared_ptr<void> argument(kernel->argument, kernel->drop);
    run = [run = kernel->run, argument] { run(argument.get()); };
  }
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

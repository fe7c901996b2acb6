#include "communicator.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "../runtime/common.h"
#include "../runtime/faults.h"
#include "../runtime/scheduler.h"
#include "demand.h"

namespace ascendsim::hccl {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<Communicator>> all;

  static Registry& Get() {
    static auto* registry = new Registry;
    return *registry;
  }
};

// What a thread has between HcclGroupStart and HcclGroupEnd.
struct Kept {
  struct Batch {
    std::shared_ptr<Communicator> communicator;
    void* stream;
    std::vector<Transfer> transfers;
  };

  int depth = 0;
  std::vector<Batch> batches;

  void Add(std::shared_ptr<Communicator> communicator, void* stream,
           const std::vector<Transfer>& transfers) {
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& other) {
      return other.communicator == communicator && other.stream == stream;
    });
    if (batch == batches.end()) {
      batch = batches.insert(batch, {std::move(communicator), stream, {}});
    }
    batch->transfers.insert(batch->transfers.end(), transfers.begin(), transfers.end());
  }
};

Kept& OfThread() {
  thread_local Kept kept;
  return kept;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::Find(void* handle) {
  const std::lock_guard lock(Registry::Get().mutex);
  const auto found = Registry::Get().all.find(handle);
  return found == Registry::Get().all.end() ? nullptr : found->second;
}

void* Communicator::Keep(std::shared_ptr<Communicator> communicator) {
  void* handle = communicator.get();
  const std::lock_guard lock(Registry::Get().mutex);
  Registry::Get().all[handle] = std::move(communicator);
  return handle;
}

void Communicator::Promise(uint64_t until_ns) {
  const std::lock_guard lock(Registry::Get().mutex);
  for (const auto& [handle, communicator] : Registry::Get().all) {
    communicator->group_->Promise(until_ns);
  }
}

void Communicator::Forget(void* handle) {
  const auto last = Find(handle);  // ends after the lock
  const std::lock_guard lock(Registry::Get().mutex);
  Registry::Get().all.erase(handle);
}

void Communicator::Name(const std::string& what, uint64_t number,
                        const std::function<void()>& body) const {
  try {
    body();
  } catch (const Failure& failure) {
    throw Failure(failure.code,
                  failure.Text(what + ", number " + std::to_string(number) + " of group " + name_ +
                               ", on " + group_->Describe(rank())));
  }
}

int Communicator::Begin(const char* name, void* handle) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!stream) return Fail(kBadArgument, std::string(name) + ": unknown stream");
  if (const int code = ErrorOf(stream->device)) return code;
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) return kSuccess;
  return Fail(kRemote, "this group has failed before, with " + broken_);
}

int Communicator::Submit(const char* name, std::shared_ptr<Operation> operation, void* handle) {
  const auto stream = Scheduler::Get().FindStream(handle);
  auto run = [self = shared_from_this(), device = stream->device, operation] {
    self->Guard(device, *operation);
  };
  const Point point = Scheduler::Get().Submit(stream, {.name = name,
                                                       .run = std::move(run),
                                                       .after = {},
                                                       .bytes = operation->Bytes(),
                                                       .kind = ASCENDSIM_KIND_COLLECTIVE,
                                                       .accesses = operation->Accesses(),
                                                       .meeting = operation});
  // Workers run everything soon, and `eager` has done so.
  if (Settings().schedule != ASCENDSIM_THREAD && !Scheduler::Get().Reached(point)) {
    RunOnDemand(point, [operation] { return operation->Wanted(); });
  }
  return kSuccess;
}

bool Communicator::Broken() const {
  const std::lock_guard lock(mutex_);
  return !broken_.empty();
}

// A failure surfaces as a kernel's does, at the next synchronisation or the next operator; a
// collective is one. After it the ranks do not agree any more on what comes next: of what was
// submitted before, nothing runs, and nothing more is accepted.
void Communicator::Guard(int device, Operation& operation) {
  if (Broken()) return;
  try {
    operation.Run();
  } catch (const Failure& failure) {
    {
      const std::lock_guard lock(mutex_);
      broken_ = failure.what();
    }
    ReportError(device, failure.what());
  }
}

int Communicator::Exchange(Exchanged exchanged, void* stream) {
  const char* name = exchanged.call.name;
  if (const int code = Begin(name, stream)) return code;
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = collectives_++;
  }
  auto operation = std::make_shared<Collective>(shared_from_this(), std::move(exchanged), number);
  return Submit(name, std::move(operation), stream);
}

std::vector<Numbered> Communicator::Number(const std::vector<Transfer>& transfers) {
  const std::lock_guard lock(mutex_);
  sent_.resize(size());
  received_.resize(size());
  std::vector<Numbered> numbered;
  for (const Transfer& t : transfers) {
    numbered.push_back(t.receives
                           ? Numbered{t, {t.peer, rank(), received_[t.peer]++}}
                           : Numbered{t, {rank(), t.peer, sent_[t.peer]++}});
  }
  return numbered;
}

void Communicator::StartGroup() { ++OfThread().depth; }

int Communicator::EndGroup() {
  Kept& kept = OfThread();
  if (kept.depth == 0) return Fail(kBadArgument, "HcclGroupEnd: no group was started");
  if (--kept.depth > 0) return kSuccess;
  for (const auto& [communicator, stream, transfers] : std::exchange(kept.batches, {})) {
    if (const int code = communicator->Batch("sends and receives", transfers, stream)) return code;
  }
  return kSuccess;
}

int Communicator::Batch(const char* name, const std::vector<Transfer>& transfers, void* stream) {
  if (OfThread().depth > 0) {
    OfThread().Add(shared_from_this(), stream, transfers);
    return kSuccess;
  }
  if (const int code = Begin(name, stream)) return code;
  return Submit(name, std::make_shared<Transfers>(shared_from_this(), Number(transfers)), stream);
}

}  // namespace ascendsim::hccl

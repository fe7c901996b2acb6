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

void Communicator::Forget(void* handle) {
  const auto last = Find(handle);  // ends after the lock
  const std::lock_guard lock(Registry::Get().mutex);
  Registry::Get().all.erase(handle);
}

void Communicator::Name(const std::string& what, uint64_t number,
                        const std::function<void()>& body) {
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
  if (const int code = TakeErrorOf(stream->device)) return code;
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) return kSuccess;
  return Fail(kRemote, "this group has failed before, with " + broken_);
}

int Communicator::Submit(Work work, void* handle) {
  const auto stream = Scheduler::Get().FindStream(handle);
  auto run = [self = shared_from_this(), device = stream->device, body = std::move(work.body)] {
    self->Guard(device, body);
  };
  const Point point = Scheduler::Get().Submit(stream, {.name = work.name,
                                                       .run = std::move(run),
                                                       .after = {},
                                                       .flops = 0,
                                                       .bytes = work.bytes});
  // Workers run everything soon, and `eager` has done so.
  if (Settings().schedule != ASCENDSIM_THREAD && !Scheduler::Get().Reached(point)) {
    RunOnDemand(point, [self = shared_from_this(), wanted = std::move(work.wanted)] {
      return wanted();
    });
  }
  return kSuccess;
}

// A failure surfaces as a kernel's does, at the next synchronisation or the next operator; a
// collective is one. After it the ranks do not agree any more on what comes next: of what was submitted before,
// nothing runs, and nothing more is accepted.
void Communicator::Guard(int device, const std::function<void()>& body) {
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) return;
  }
  try {
    body();
  } catch (const Failure& failure) {
    {
      const std::lock_guard lock(mutex_);
      broken_ = failure.what();
    }
    ReportError(device, failure.what());
  }
}

int Communicator::Exchange(const Call& call, std::vector<Piece> pieces, Use use, void* stream) {
  if (const int code = Begin(call.name, stream)) return code;
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = collectives_++;
  }
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  auto body = [this, call, number, pieces = std::move(pieces), use = std::move(use)] {
    Name(call.Text(), number, [&] { RunExchange(call, number, pieces, use); });
  };
  auto wanted = [this, number] {
    bool any = false;
    for (uint32_t i = 0; i < size(); ++i) any |= group_->Posted({i, Group::kAll, number});
    return any;
  };
  return Submit({call.name, bytes, std::move(body), std::move(wanted)}, stream);
}

void Communicator::RunExchange(const Call& call, uint64_t number, const std::vector<Piece>& pieces,
                               const Use& use) {
  const auto message = [number](uint32_t from) {
    return Group::Message{from, Group::kAll, number};
  };
  group_->Post(message(rank()), call, pieces);
  const auto missing = [&] {
    std::vector<uint32_t> ranks;
    for (uint32_t i = 0; i < size(); ++i) {
      if (!group_->Posted(message(i))) ranks.push_back(i);
    }
    return ranks;
  };
  group_->Await(missing, "call it");
  Parts parts;
  for (uint32_t i = 0; i < size(); ++i) {
    const std::string theirs = group_->CallOf(message(i));
    if (theirs != call.Text()) {
      throw Failure(kRemote, group_->Describe(i) + " calls " + theirs +
                                 "\n  instead  let all ranks do the same in the same order");
    }
    parts.push_back(group_->Open(message(i)));
  }
  use(parts);
  parts.clear();
  for (uint32_t i = 0; i < size(); ++i) group_->Release(message(i));
}

std::string Communicator::Numbered::Text() const {
  const std::string what = std::to_string(transfer.count) + " " + hccl::NameOf(transfer.type);
  return transfer.receives ? "recv of " + what + " from rank " + std::to_string(transfer.peer)
                           : "send of " + what + " to rank " + std::to_string(transfer.peer);
}

std::vector<Communicator::Numbered> Communicator::Number(const std::vector<Transfer>& transfers) {
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

int Communicator::Batch(const char* name, const std::vector<Transfer>& transfers, void* stream) {
  if (const int code = Begin(name, stream)) return code;
  uint64_t bytes = 0;
  for (const Transfer& transfer : transfers) bytes += transfer.count * SizeOf(transfer.type);
  const auto numbered = Number(transfers);
  auto wanted = [this, numbered] {
    return std::any_of(numbered.begin(), numbered.end(),
                       [this](const Numbered& transfer) { return Wanted(transfer); });
  };
  auto body = [this, numbered] { RunBatch(numbered); };
  return Submit({name, bytes, std::move(body), std::move(wanted)}, stream);
}

// A send is wanted by who receives, and a receive by a sender that may not go on before it.
bool Communicator::Wanted(const Numbered& transfer) const {
  return transfer.transfer.receives ? group_->Insisted(transfer.message)
                                    : group_->Asked(transfer.message);
}

void Communicator::RunBatch(const std::vector<Numbered>& transfers) {
  const auto each = [&](bool receives, void (Communicator::*act)(const Numbered&)) {
    for (const Numbered& t : transfers) {
      if (t.transfer.receives != receives) continue;
      Name(t.Text(), t.message.number, [&] { (this->*act)(t); });
    }
  };
  each(false, &Communicator::Send);
  each(true, &Communicator::Receive);
  if (Settings().blocking_sends) each(false, &Communicator::AwaitReceipt);
}

void Communicator::Send(const Numbered& send) {
  const auto& [receives, buffer, count, type, peer] = send.transfer;
  const Call call = {.name = "send", .type = type, .count = count};
  group_->Post(send.message, call, {{buffer, count * SizeOf(type)}});
  if (Settings().blocking_sends) group_->Insist(send.message);
}

void Communicator::AwaitReceipt(const Numbered& send) {
  const auto missing = [&] {
    std::vector<uint32_t> ranks;
    if (!group_->Read(send.message)) ranks.push_back(send.transfer.peer);
    return ranks;
  };
  group_->Await(missing, "receive it (blocking_sends is on)");
}

void Communicator::Receive(const Numbered& receive) {
  const auto& [receives, buffer, count, type, peer] = receive.transfer;
  group_->Ask(receive.message);
  const auto missing = [&] {
    std::vector<uint32_t> ranks;
    if (!group_->Posted(receive.message)) ranks.push_back(receive.transfer.peer);
    return ranks;
  };
  group_->Await(missing, "send it");
  {
    const View view = group_->Open(receive.message);
    if (view.bytes() != count * SizeOf(type)) {
      throw Failure(kRemote, group_->Describe(peer) + " calls " + group_->CallOf(receive.message));
    }
    if (view.bytes() > 0) std::memcpy(buffer, view.data(), view.bytes());
  }
  group_->Release(receive.message);
}

}  // namespace ascendsim::hccl

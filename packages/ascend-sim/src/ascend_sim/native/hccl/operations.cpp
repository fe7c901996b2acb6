#include "operations.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../runtime/common.h"
#include "../runtime/model.h"
#include "communicator.h"

namespace ascendsim::hccl {

Group& Operation::group() const { return communicator_->group(); }

void Operation::Run() {
  if (!arrived_) {
    Post(0);
    AwaitOthers();
  }
  if (failure_) throw *failure_;
  Use();
}

void Operation::Try(const std::function<void()>& step) {
  try {
    step();
  } catch (const Failure& failure) {
    failure_ = failure;  // the task tells, when it runs
    over_ = true;
  }
}

void Operation::Arrive(uint64_t ready_ns) {
  ready_ns_ = ready_ns;
  if (communicator_->Broken()) {
    over_ = true;
  } else {
    Try([&] { Post(ready_ns); });
  }
  arrived_ = true;
}

bool Operation::Complete() const {
  seen_ = group().Changes();
  return over_ || Met();
}

void Operation::Await(uint64_t promise_ns) {
  if (!deadline_) deadline_ = Group::Deadline();
  Communicator::Promise(promise_ns);
  group().Sleep(seen_);
  Try([this] { CheckOthers(*deadline_); });
}

Meeting::Times Operation::When() const {
  return over_ ? Times{ready_ns_, ready_ns_} : TimesSince(ready_ns_);
}

bool Collective::Wanted() const {
  if (arrived()) return false;
  bool any = false;
  for (uint32_t i = 0; i < group().size(); ++i) any |= group().Posted(MessageOf(i));
  return any;
}

uint64_t Collective::Bytes() const {
  uint64_t bytes = 0;
  for (const Piece& piece : its_.pieces) bytes += piece.bytes;
  return bytes;
}

void Collective::Post(uint64_t ready_ns) {
  communicator().Name(its_.call.Text(), number_, [&] {
    group().Post(MessageOf(group().rank()), its_.call, its_.pieces, {ready_ns, its_.takes_ns});
  });
}

std::vector<uint32_t> Collective::Missing() const {
  std::vector<uint32_t> ranks;
  for (uint32_t i = 0; i < group().size(); ++i) {
    if (!group().Posted(MessageOf(i))) ranks.push_back(i);
  }
  return ranks;
}

void Collective::AwaitOthers() {
  communicator().Name(its_.call.Text(), number_,
                      [this] { group().Await([this] { return Missing(); }, "call it"); });
}

void Collective::CheckOthers(Group::Moment deadline) const {
  communicator().Name(its_.call.Text(), number_, [&] {
    group().Check([this] { return Missing(); }, "call it", deadline);
  });
}

// It begins when the last is ready, and takes as long as the longest part.
Meeting::Times Collective::TimesSince(uint64_t ready_ns) const {
  uint64_t begin = ready_ns, takes = its_.takes_ns;
  for (uint32_t i = 0; i < group().size(); ++i) {
    // The promise first: what was posted since keeps it.
    const Timing promised = {group().PromiseOf(i), 0};
    const bool posted = group().Posted(MessageOf(i));
    const Timing theirs = posted ? group().TimingOf(MessageOf(i)) : promised;
    begin = std::max(begin, theirs.ready_ns);
    takes = std::max(takes, theirs.takes_ns);
  }
  return {begin, begin + takes};
}

void Collective::Use() {
  communicator().Name(its_.call.Text(), number_, [this] {
    Parts parts;
    for (uint32_t i = 0; i < group().size(); ++i) {
      const std::string theirs = group().CallOf(MessageOf(i));
      if (theirs != its_.call.Text()) {
        throw Failure(kRemote, group().Describe(i) + " calls " + theirs +
                                   "\n  instead  let all ranks do the same in the same order");
      }
      parts.push_back(group().Open(MessageOf(i)));
    }
    its_.use(parts);
    parts.clear();
    for (uint32_t i = 0; i < group().size(); ++i) group().Release(MessageOf(i));
  });
}

std::string Numbered::Text() const {
  const std::string what = std::to_string(transfer.count) + " " + NameOf(transfer.type);
  return transfer.receives ? "recv of " + what + " from rank " + std::to_string(transfer.peer)
                           : "send of " + what + " to rank " + std::to_string(transfer.peer);
}

void Transfers::Each(bool receives, const std::function<void(const Numbered&)>& act) const {
  for (const Numbered& one : all_) {
    if (one.transfer.receives != receives) continue;
    communicator().Name(one.Text(), one.message.number, [&] { act(one); });
  }
}

// A send is wanted by who receives, and a receive by a sender that may not go on before it.
bool Transfers::IsWanted(const Numbered& one) const {
  return one.transfer.receives ? group().Insisted(one.message)
                               : !arrived() && group().Asked(one.message);
}

bool Transfers::Wanted() const {
  return std::any_of(all_.begin(), all_.end(), [this](const Numbered& t) { return IsWanted(t); });
}

uint64_t Transfers::Bytes() const {
  uint64_t bytes = 0;
  for (const Numbered& one : all_) bytes += one.Bytes();
  return bytes;
}

std::vector<Access> Transfers::Accesses() const {
  std::vector<Access> accesses;
  for (const Numbered& one : all_) {
    accesses.push_back(Access::Of(one.transfer.buffer, one.Bytes(), one.transfer.receives));
  }
  return accesses;
}

void Transfers::Post(uint64_t ready_ns) {
  Each(true, [this](const Numbered& receive) { group().Ask(receive.message); });
  Each(false, [this, ready_ns](const Numbered& send) {
    const Transfer& its = send.transfer;
    const Call call = {.name = "send", .type = its.type, .count = its.count};
    const Timing timing = {ready_ns, LinkNanoseconds(1, static_cast<double>(send.Bytes()))};
    group().Post(send.message, call, {{its.buffer, send.Bytes()}}, timing);
    if (Settings().blocking_sends) group().Insist(send.message);
  });
}

std::vector<uint32_t> Transfers::MissingFor(const Numbered& receive) const {
  if (group().Posted(receive.message)) return {};
  return {receive.transfer.peer};
}

void Transfers::AwaitOthers() {
  Each(true, [this](const Numbered& receive) {
    group().Await([&] { return MissingFor(receive); }, "send it");
  });
}

void Transfers::CheckOthers(Group::Moment deadline) const {
  Each(true, [&](const Numbered& receive) {
    group().Check([&] { return MissingFor(receive); }, "send it", deadline);
  });
}

bool Transfers::Met() const {
  return std::all_of(all_.begin(), all_.end(), [this](const Numbered& one) {
    return !one.transfer.receives || group().Posted(one.message);
  });
}

// A message is under way from the moment at which its sender was ready. A receive begins when the
// first is, and all end with the last.
Meeting::Times Transfers::TimesSince(uint64_t ready_ns) const {
  uint64_t begin = UINT64_MAX, end = ready_ns;
  for (const Numbered& one : all_) {
    Timing timing = {ready_ns, LinkNanoseconds(1, static_cast<double>(one.Bytes()))};
    if (one.transfer.receives) {
      timing.ready_ns = group().PromiseOf(one.transfer.peer);
      if (group().Posted(one.message)) timing = group().TimingOf(one.message);
    }
    begin = std::min(begin, timing.ready_ns);
    end = std::max(end, timing.ready_ns + timing.takes_ns);
  }
  return {begin == UINT64_MAX ? ready_ns : std::max(ready_ns, begin), end};
}

void Transfers::Use() {
  Each(true, [this](const Numbered& receive) { Take(receive); });
  if (Settings().blocking_sends) Each(false, [this](const Numbered& send) { AwaitReceipt(send); });
}

void Transfers::AwaitReceipt(const Numbered& send) const {
  const auto missing = [&] {
    std::vector<uint32_t> ranks;
    if (!group().Read(send.message)) ranks.push_back(send.transfer.peer);
    return ranks;
  };
  group().Await(missing, "receive it (blocking_sends is on)");
}

void Transfers::Take(const Numbered& receive) const {
  {
    const View view = group().Open(receive.message);
    if (view.bytes() != receive.Bytes()) {
      throw Failure(kRemote, group().Describe(receive.transfer.peer) + " calls " +
                                 group().CallOf(receive.message));
    }
    if (view.bytes() > 0) std::memcpy(receive.transfer.buffer, view.data(), view.bytes());
  }
  group().Release(receive.message);
}

}  // namespace ascendsim::hccl

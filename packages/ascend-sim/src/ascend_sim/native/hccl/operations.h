// What a rank does in a collective, and in sends and receives.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../runtime/scheduler.h"
#include "group.h"

namespace ascendsim::hccl {

class Communicator;

// An operation has three steps: a rank posts what it sends, waits for what the others send, and
// uses that. In schedule `timed` it posts when it is ready, and with that the time, and uses what
// it got when the task ends; in the others it does all when the task runs.
class Operation : public Meeting {
 public:
  explicit Operation(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  // Does what is left to do. Throws Failure.
  void Run();

  // Whether a peer waits for what this rank has not done yet.
  virtual bool Wanted() const = 0;
  virtual uint64_t Bytes() const = 0;
  virtual std::vector<Access> Accesses() const = 0;

  void Arrive(uint64_t ready_ns) override;
  bool Complete() const override;
  void Await(uint64_t promise_ns) override;
  Times When() const override;

 protected:
  // They throw Failure.
  virtual void Post(uint64_t ready_ns) = 0;
  virtual void AwaitOthers() = 0;
  virtual void Use() = 0;

  virtual bool Met() const = 0;  // all that is waited for was posted
  virtual void CheckOthers(Group::Moment deadline) const = 0;
  virtual Times TimesSince(uint64_t ready_ns) const = 0;

  bool arrived() const { return arrived_; }
  Group& group() const;
  const Communicator& communicator() const { return *communicator_; }

 private:
  void Try(const std::function<void()>& step);

  const std::shared_ptr<Communicator> communicator_;
  std::atomic<bool> arrived_{false};
  uint64_t ready_ns_ = 0;
  std::optional<Group::Moment> deadline_;
  mutable uint32_t seen_ = 0;  // changes of the group, when it was asked how far this is
  bool over_ = false;  // it has failed, or is not to be begun
  std::optional<Failure> failure_;
};

// A collective: each rank posts its pieces, and when all have, `use` gets what each has sent, by
// rank. So every collective is a barrier too.
using Parts = std::vector<View>;
struct Exchanged {
  Call call;
  std::vector<Piece> pieces;
  std::function<void(const Parts& parts)> use;
  std::vector<Access> accesses;
  uint64_t takes_ns = 0;  // on the modelled clock, from the moment at which all are ready
};

class Collective final : public Operation {
 public:
  Collective(std::shared_ptr<Communicator> communicator, Exchanged exchanged, uint64_t number)
      : Operation(std::move(communicator)), its_(std::move(exchanged)), number_(number) {}

  bool Wanted() const override;
  uint64_t Bytes() const override;
  std::vector<Access> Accesses() const override { return its_.accesses; }

 protected:
  void Post(uint64_t ready_ns) override;
  void AwaitOthers() override;
  void CheckOthers(Group::Moment deadline) const override;
  void Use() override;
  bool Met() const override { return Missing().empty(); }
  Times TimesSince(uint64_t ready_ns) const override;

 private:
  Group::Message MessageOf(uint32_t rank) const { return {rank, Group::kAll, number_}; }
  std::vector<uint32_t> Missing() const;

  const Exchanged its_;
  const uint64_t number_;
};

struct Transfer {
  bool receives;
  void* buffer;
  uint64_t count;
  DataType type;
  uint32_t peer;
};

struct Numbered {
  Transfer transfer;
  Group::Message message;

  uint64_t Bytes() const { return transfer.count * SizeOf(transfer.type); }
  std::string Text() const;
};

// Sends and receives that begin together.
class Transfers final : public Operation {
 public:
  Transfers(std::shared_ptr<Communicator> communicator, std::vector<Numbered> transfers)
      : Operation(std::move(communicator)), all_(std::move(transfers)) {}

  bool Wanted() const override;
  uint64_t Bytes() const override;
  std::vector<Access> Accesses() const override;

 protected:
  void Post(uint64_t ready_ns) override;
  void AwaitOthers() override;
  void CheckOthers(Group::Moment deadline) const override;
  void Use() override;
  bool Met() const override;
  Times TimesSince(uint64_t ready_ns) const override;

 private:
  void Each(bool receives, const std::function<void(const Numbered&)>& act) const;
  std::vector<uint32_t> MissingFor(const Numbered& receive) const;
  void Take(const Numbered& receive) const;
  void AwaitReceipt(const Numbered& send) const;
  bool IsWanted(const Numbered& transfer) const;

  const std::vector<Numbered> all_;
};

}  // namespace ascendsim::hccl

// A communicator: a rank's end of a group. Its operations are tasks on the stream they are given,
// and run when the schedule runs those.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "group.h"

namespace ascendsim::hccl {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::string name, std::unique_ptr<Group> group)
      : name_(std::move(name)), group_(std::move(group)) {}

  // Finds the communicator behind a handle, or null.
  static std::shared_ptr<Communicator> Find(void* handle);
  static void* Keep(std::shared_ptr<Communicator> communicator);
  // Its pending operations stay able to run.
  static void Forget(void* handle);

  const std::string& name() const { return name_; }
  uint32_t size() const { return group_->size(); }
  uint32_t rank() const { return group_->rank(); }

  // A collective. Each rank posts its `pieces`, and when all have, `use` gets what each has sent,
  // by rank: so every collective is a barrier too. Pieces are read when the task runs.
  using Parts = std::vector<View>;
  using Use = std::function<void(const Parts& parts)>;
  int Exchange(const Call& call, std::vector<Piece> pieces, Use use, void* stream);

  // Sends and receives that begin together, as one task.
  struct Transfer {
    bool receives;
    void* buffer;
    uint64_t count;
    DataType type;
    uint32_t peer;
  };
  int Batch(const char* name, const std::vector<Transfer>& transfers, void* stream);

 private:
  struct Numbered {
    Transfer transfer;
    Group::Message message;

    std::string Text() const;
  };

  std::vector<Numbered> Number(const std::vector<Transfer>& transfers);
  void RunExchange(const Call& call, uint64_t number, const std::vector<Piece>& pieces,
                   const Use& use);
  void RunBatch(const std::vector<Numbered>& transfers);
  void Send(const Numbered& send);
  void AwaitReceipt(const Numbered& send);
  void Receive(const Numbered& receive);
  bool Wanted(const Numbered& transfer) const;

  struct Work {
    const char* name;  // a literal
    uint64_t bytes;
    std::function<void()> body;    // may throw Failure
    std::function<bool()> wanted;  // a peer waits for it
  };
  // Fails where something has failed before; the operation is not counted then.
  int Begin(const char* name, void* stream);
  // Submits a task, and lets it run when a peer waits for it.
  int Submit(Work work, void* stream);
  void Guard(int device, const std::function<void()>& body);
  // Runs `body`; a failure gets to say of which operation it is.
  void Name(const std::string& what, uint64_t number, const std::function<void()>& body);

  const std::string name_;  // as torch_npu prints it
  const std::unique_ptr<Group> group_;
  std::mutex mutex_;  // of what follows
  uint64_t collectives_ = 0;
  std::vector<uint64_t> sent_, received_;  // by peer
  std::string broken_;  // why an operation failed
};

}  // namespace ascendsim::hccl

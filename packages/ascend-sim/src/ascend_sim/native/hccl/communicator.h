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
#include "operations.h"

namespace ascendsim::hccl {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::string name, std::unique_ptr<Group> group)
      : name_(std::move(name)), group_(std::move(group)) {}

  // Finds the communicator behind a handle, or null.
  static std::shared_ptr<Communicator> Find(void* handle);
  static void* Keep(std::shared_ptr<Communicator> communicator);
  // In all groups: on the modelled clock, this process posts nothing until then.
  static void Promise(uint64_t until_ns);
  // Its pending operations stay able to run.
  static void Forget(void* handle);

  const std::string& name() const { return name_; }
  uint32_t size() const { return group_->size(); }
  uint32_t rank() const { return group_->rank(); }
  Group& group() const { return *group_; }

  // Counts a collective, and submits it.
  int Exchange(Exchanged exchanged, void* stream);
  // Sends and receives that begin together, as one task. Within a HcclGroupStart they are kept, and
  // begin together with all others of the same stream when it ends.
  int Batch(const char* name, const std::vector<Transfer>& transfers, void* stream);

  // Between them, this thread's sends and receives are kept.
  static void StartGroup();
  static int EndGroup();

  // Runs `body`; a failure gets to say of which operation it is.
  void Name(const std::string& what, uint64_t number, const std::function<void()>& body) const;
  bool Broken() const;

 private:
  std::vector<Numbered> Number(const std::vector<Transfer>& transfers);
  // Fails where something has failed before; the operation is not counted then.
  int Begin(const char* name, void* stream);
  // Submits a task, and lets it run when a peer waits for it.
  int Submit(const char* name, std::shared_ptr<Operation> operation, void* stream);
  void Guard(int device, Operation& operation);

  const std::string name_;  // as torch_npu prints it
  const std::unique_ptr<Group> group_;
  mutable std::mutex mutex_;  // of what follows
  uint64_t collectives_ = 0;
  std::vector<uint64_t> sent_, received_;  // by peer
  std::string broken_;  // why an operation failed
};

}  // namespace ascendsim::hccl

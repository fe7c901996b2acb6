// Streams, the tasks on them, and the order in which they run.
//
// A stream is a queue. Each task has a ticket: its place in the order of submission. A Point names
// a ticket of a stream, and is reached once that many tasks have finished. Everything that waits,
// waits for a Point: an event is the Point of its latest record, so that a wait binds to the record
// that preceded it, as in CUDA and ACL, and a later record of the same event disturbs nobody.
// Waits therefore only look back in the order of submission, and no cycle is possible.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "control.h"
#include "races.h"

namespace ascendsim {

struct Stream;
using StreamRef = std::shared_ptr<Stream>;
using Lock = std::unique_lock<std::mutex>;

struct Point {
  StreamRef stream;  // null: reached from the beginning
  uint64_t ticket = 0;

  bool Reached() const;
};

// Where processes meet in a task. Schedule `timed` asks it when the task begins and ends, for each
// process has a clock of its own.
class Meeting {
 public:
  struct Times {
    uint64_t begin_ns = 0, end_ns = 0;
  };

  virtual ~Meeting() = default;
  // This process is ready. Called once, without the scheduler's lock: it may wait.
  virtual void Arrive(uint64_t ready_ns) = 0;
  // What follows is of a process that has arrived.
  virtual bool Complete() const = 0;  // all others have arrived, or there is an error
  virtual Times When() const = 0;     // exact where it is complete, and else not before that
  // Waits a moment for the others, without the scheduler's lock. They are told that this process
  // arrives nowhere before `promise_ns`.
  virtual void Await(uint64_t promise_ns) = 0;
};

struct Task {
  const char* name = "";
  std::function<void()> run;  // may be empty
  Point after;                // what must be reached first
  uint64_t flops = 0, bytes = 0;
  AscendsimKind kind = ASCENDSIM_KIND_KERNEL;
  uint64_t flop_bytes = 0;            // of a number that is multiplied
  std::vector<Access> accesses = {};      // where races are traced
  std::shared_ptr<Meeting> meeting = {};  // kind COLLECTIVE: with other processes
  uint64_t order = 0;                     // its place among the tasks of all streams

  // Schedule `timed` only.
  uint64_t submitted_ns = 0, begin_ns = 0, end_ns = 0;
  bool arrived = false;  // at the meeting
  bool begun = false;
};

// All fields are guarded by the scheduler's mutex.
struct Stream {
  int id = 0;
  int device = 0;
  bool main = false;  // its device's first: where torch_npu computes unless told otherwise
  std::deque<Task> queue;
  uint64_t submitted = 0;
  uint64_t finished = 0;
  uint64_t queries = 0;   // since the last submission
  bool busy = false;      // one of its tasks runs
  bool stopping = false;  // its worker is to end
  uint64_t free_ns = 0;   // schedule `timed`: when its last task ended
  Knowledge known;        // where races are traced: what its next task comes after
  std::condition_variable wake;
  std::thread worker;  // schedule `thread` only
};

struct Event {
  Point last;            // of the latest record
  uint64_t queries = 0;  // since then
  uint64_t finished_ns = 0;
  Knowledge known;  // where races are traced: what had finished once it is reached
};
using EventRef = std::shared_ptr<Event>;

class Scheduler;

// Decides when tasks run. Called with the scheduler's mutex held; an implementation may release it
// while a task runs.
class Schedule {
 public:
  virtual ~Schedule() = default;
  virtual void Submitted(Lock& lock, const StreamRef& stream) = 0;
  virtual void Await(Lock& lock, const Point& goal) = 0;
  // Reaches `goal` because another process needs it, and not this one's host.
  virtual void Serve(Lock& lock, const Point& goal) { Await(lock, goal); }
  // The host asked, for the `times`-th time in a row, whether `goal` is reached; it is not.
  virtual void Polled(Lock& lock, const Point& goal, uint64_t times);
  // The time at which the task that runs now ends.
  virtual uint64_t Nanoseconds() const;
  // Makes the choices of a random schedule begin anew.
  virtual void Reseed() {}
};

class Scheduler {
 public:
  // Lives until the process ends, so that threads that outlive main() find it.
  static Scheduler& Get();

  StreamRef CreateStream(int device);
  StreamRef DefaultStream(int device);
  // Finds the stream behind a handle; null is the default stream of the current device.
  StreamRef FindStream(void* handle);
  // Waits for the stream's tasks, and forgets it.
  void DestroyStream(const StreamRef& stream);

  Point Submit(const StreamRef& stream, Task task);
  void Record(const StreamRef& stream, const EventRef& event);
  void MakeWait(const StreamRef& stream, const EventRef& event);

  void Await(const StreamRef& stream);
  void Await(const EventRef& event);
  void AwaitDevice(int device);
  void AwaitAll();
  // Awaits a stream for the simulator's own sake: no order that the program could rely on.
  void Settle(const StreamRef& stream);
  // Reaches `goal` for another process: the host does not wait, and learns nothing.
  void Serve(const Point& goal);

  bool Query(const StreamRef& stream);
  bool Query(const EventRef& event);
  bool Reached(const Point& goal);  // runs nothing
  uint64_t FinishedNanoseconds(const EventRef& event);

  uint64_t Submitted();
  uint64_t Pending();
  void Reseed();
  std::vector<AscendsimRace> TakeRaces();

  // For schedules, which hold the lock.
  const std::map<int, StreamRef>& Streams() const { return streams_; }
  void RunFront(Lock& lock, const StreamRef& stream);
  // Runs the next task of those that `goal` depends on, or waits while another thread does.
  void RunNext(Lock& lock, Point goal);
  void RunUntil(Lock& lock, const Point& goal);
  void WaitForChange(Lock& lock) { changed_.wait(lock); }
  void Changed() { changed_.notify_all(); }

 private:
  Scheduler();
  Point Push(const StreamRef& stream, Task task);
  void Finish(const StreamRef& stream);
  void AwaitEach(const std::function<bool(const Stream&)>& chosen);

  std::mutex mutex_;
  std::condition_variable changed_;  // some task finished, or met its peers
  std::unordered_map<void*, StreamRef> handles_;
  std::map<int, StreamRef> streams_;  // by number, so that choices among them can be repeated
  std::unordered_map<int, StreamRef> defaults_;
  int next_id_ = 0;
  uint64_t submitted_ = 0;
  Races races_;
  std::unique_ptr<Schedule> schedule_;
};

}  // namespace ascendsim

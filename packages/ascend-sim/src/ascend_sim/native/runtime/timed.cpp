// The schedule `timed`: a discrete-event simulation on a modelled clock. Nobody sleeps.
//
// [Note: the modelled clock]
//
// The host has a clock: a submission moves it by `launch_us`, a synchronisation to the completion
// that it waits for; all else that a host does takes no time. All host threads share it.
//
// A task begins once the host has submitted it, the task before it on its stream has ended, what it
// waits for is reached, and its engine is free. A device has one engine each for kernels, copies in
// either direction and copies within; of the tasks that are ready, an engine takes the one that was
// submitted first. A task ends after its modelled duration (model.h), and *then* its work is done:
// so who reads too early reads the old bytes, exactly where that would happen at these speeds.
//
// [Note: where clocks meet]
//
// Each process has a clock of its own. In a collective, and in a receive, they meet: a process that
// is ready tells the others when, and the collective begins for all when the last is. Until all
// have told, a process knows only how early it can end. Its clock goes that far. Then the host goes
// on submitting, and the clock stays behind; who asks it for more, a synchronisation or a query,
// waits (in truth, not on the clock) for what the others tell. So no answer depends on which
// process happens to be faster.
//
// While it waits, a process promises to arrive nowhere before the next thing that can happen to it.
// What a peer promises moves the time before which a meeting with it cannot end, and with that the
// own promise. So processes that wait for one another go on in turn, each as far as is certain: the
// null messages of K. M. Chandy, J. Misra, "Distributed simulation", IEEE Trans. Softw. Eng. 5
// (1979), and R. E. Bryant's. It needs meetings that take some time, as `link_latency_us` sees to.
//
// Between two calls of the program everything has happened that happens up to the host's time, and
// nothing after: what is submitted later cannot begin earlier. So a query compares the event's
// completion with the host's clock, and all figures are the same from run to run.
//
// A program that polls would wait for ever: from the `query_stall`-th query on, a query moves the
// host to the next completion.
#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "common.h"
#include "model.h"
#include "schedules.h"
#include "spans.h"

namespace ascendsim {
namespace {

class Timed final : public Schedule {
 public:
  explicit Timed(Scheduler& scheduler) : scheduler_(scheduler) {}

  void Submitted(Lock& lock, const StreamRef& stream) override {
    Spans::Get().MoveHost(LaunchNanoseconds());
    stream->queue.back().submitted_ns = Host();
    Advance(lock);
  }

  void Await(Lock& lock, const Point& goal) override {
    if (goal.Reached()) return;
    const uint64_t began = Host();
    Serve(lock, goal);
    if (now_ > began) {
      Spans::Get().MoveHost(now_ - began);
      Spans::Get().AddWait(goal, began, now_);
    }
    Advance(lock);
  }

  void Serve(Lock& lock, const Point& goal) override {
    while (!goal.Reached()) Continue(lock, kForEver);
  }

  void Polled(Lock& lock, const Point& goal, uint64_t times) override {
    while (!goal.Reached() && Continue(lock, Host())) continue;
    if (goal.Reached() || times < Settings().query_stall) return;
    Await(lock, {goal.stream, goal.stream->finished + 1});
  }

  uint64_t Nanoseconds() const override { return now_; }

 private:
  using Engine = std::pair<int, AscendsimKind>;  // of a device, for a kind of task

  static constexpr uint64_t kForEver = std::numeric_limits<uint64_t>::max();

  struct Next {
    uint64_t time = kForEver;
    bool begins = false;  // or ends, which comes first at the same time
    uint64_t order = 0;
    StreamRef stream;
    bool open = false;  // it ends then or later: others have not arrived

    bool operator<(const Next& other) const {
      return std::tie(time, begins, order) < std::tie(other.time, other.begins, other.order);
    }
  };

  static uint64_t Host() { return Spans::Get().Host(); }

  static bool NeedsEngine(const Task& task) { return task.kind <= ASCENDSIM_KIND_D2D; }

  // Lets everything happen that happens up to the host's time, as far as is known.
  void Advance(Lock& lock) {
    while (!advancing_) {
      const Next next = Find();
      if (!next.stream || next.time > Host() || next.open) return;
      Step(lock, next);
    }
  }

  // Lets the next thing happen, if it does not happen after `latest`, or waits while another thread
  // does. Returns whether there was one.
  bool Continue(Lock& lock, uint64_t latest) {
    if (advancing_) {
      scheduler_.WaitForChange(lock);
      return true;
    }
    const Next next = Find();
    if (!next.stream || next.time > latest) return false;
    Step(lock, next);
    return true;
  }

  Next Find() {
    Next next;
    for (const auto& [id, stream] : scheduler_.Streams()) {
      if (!stream->queue.empty()) next = std::min(next, NextOf(stream));
    }
    return next;
  }

  void Step(Lock& lock, const Next& next) {
    Task& task = next.stream->queue.front();
    if (next.open) {
      Meet(lock, [meeting = task.meeting, until = next.time] { meeting->Await(until); });
      return;
    }
    now_ = next.time;
    if (!next.begins) {
      End(lock, next.stream);
    } else if (task.meeting) {
      task.arrived = true;
      Meet(lock, [this, meeting = task.meeting] { meeting->Arrive(now_); });
    } else {
      Begin(*next.stream);
    }
  }

  // Meanwhile other threads leave the clock alone.
  void Meet(Lock& lock, const std::function<void()>& act) {
    advancing_ = true;
    lock.unlock();
    act();
    lock.lock();
    advancing_ = false;
    scheduler_.Changed();
  }

  Next NextOf(const StreamRef& stream) {
    Task& task = stream->queue.front();
    if (task.arrived && !task.begun) {
      const bool open = !task.meeting->Complete();
      const auto [begin, end] = task.meeting->When();
      if (open) return {std::max(now_, end), false, task.order, stream, true};
      task.begun = true;
      task.begin_ns = begin;
      task.end_ns = std::max(now_, end);
    }
    if (task.begun) return {task.end_ns, false, task.order, stream};
    if (!task.after.Reached()) return {};
    uint64_t time = std::max({now_, task.submitted_ns, stream->free_ns});
    if (NeedsEngine(task)) time = std::max(time, engines_[{stream->device, task.kind}]);
    return {time, true, task.order, stream};
  }

  void Begin(Stream& stream) {
    Task& task = stream.queue.front();
    task.begun = true;
    task.begin_ns = now_;
    task.end_ns = now_ + TaskNanoseconds(task);
    if (NeedsEngine(task)) engines_[{stream.device, task.kind}] = task.end_ns;
  }

  void End(Lock& lock, const StreamRef& stream) {
    const Task& task = stream->queue.front();
    stream->free_ns = task.end_ns;
    Spans::Get().AddTask(*stream, task);
    advancing_ = true;  // while the lock is released
    scheduler_.RunFront(lock, stream);
    advancing_ = false;
  }

  Scheduler& scheduler_;
  uint64_t now_ = 0;  // when the last thing happened
  bool advancing_ = false;
  std::map<Engine, uint64_t> engines_;  // until when each is taken
};

}  // namespace

std::unique_ptr<Schedule> MakeTimed(Scheduler& scheduler) {
  return std::make_unique<Timed>(scheduler);
}

}  // namespace ascendsim

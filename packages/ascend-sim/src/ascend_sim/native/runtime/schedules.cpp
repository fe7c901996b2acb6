// The schedules that are as a real device could be, as lazy as can be, and not at all asynchronous.
#include "schedules.h"

#include "common.h"

namespace ascendsim {

void Schedule::Polled(Lock&, const Point&, uint64_t) {}

uint64_t Schedule::Nanoseconds() const { return NowNanoseconds(); }

namespace {

// Nothing overlaps and nothing is late: memory figures are those of the program's order.
class Eager final : public Schedule {
 public:
  explicit Eager(Scheduler& scheduler) : scheduler_(scheduler) {}

  void Submitted(Lock& lock, const StreamRef& stream) override {
    scheduler_.RunUntil(lock, {stream, stream->submitted});
  }

  void Await(Lock& lock, const Point& goal) override { scheduler_.RunUntil(lock, goal); }

 private:
  Scheduler& scheduler_;
};

// Every task is as late as the program allows. What a program reads without having waited for it is
// therefore always the old value, and a missing synchronisation shows on every run.
class Lazy final : public Schedule {
 public:
  explicit Lazy(Scheduler& scheduler) : scheduler_(scheduler) {}

  void Submitted(Lock&, const StreamRef&) override {}

  void Await(Lock& lock, const Point& goal) override { scheduler_.RunUntil(lock, goal); }

  // The caching allocators query their events on every allocation: progress there would hide races.
  // From the `query_stall`-th query on, a task runs per query, so that a polling loop ends.
  void Polled(Lock& lock, const Point& goal, uint64_t times) override {
    if (times < Settings().query_stall) return;
    scheduler_.RunUntil(lock, {goal.stream, goal.stream->finished + 1});
  }

 private:
  Scheduler& scheduler_;
};

// One worker per stream, made when the stream is first used: torch_npu keeps pools of streams.
class Threaded final : public Schedule {
 public:
  explicit Threaded(Scheduler& scheduler) : scheduler_(scheduler) {}

  void Submitted(Lock& lock, const StreamRef& stream) override {
    if (!stream->worker.joinable()) {
      std::mutex* mutex = lock.mutex();
      stream->worker = std::thread([this, mutex, stream] { Work(*mutex, stream); });
    }
    stream->wake.notify_one();
  }

  void Await(Lock& lock, const Point& goal) override {
    while (!goal.Reached()) scheduler_.WaitForChange(lock);
  }

 private:
  void Work(std::mutex& mutex, const StreamRef& stream) {
    Lock lock(mutex);
    const auto ready = [&] {
      return !stream->queue.empty() && stream->queue.front().after.Reached();
    };
    while (!stream->stopping) {
      if (ready()) {
        scheduler_.RunFront(lock, stream);
      } else {
        stream->wake.wait(lock);
      }
    }
  }

  Scheduler& scheduler_;
};

}  // namespace

std::unique_ptr<Schedule> MakeSchedule(Scheduler& scheduler) {
  switch (Settings().schedule) {
    case ASCENDSIM_THREAD:
      return std::make_unique<Threaded>(scheduler);
    case ASCENDSIM_LAZY:
      return std::make_unique<Lazy>(scheduler);
    case ASCENDSIM_EARLY:
      return MakeEarly(scheduler);
    case ASCENDSIM_RANDOM:
      return MakeRandom(scheduler);
    case ASCENDSIM_TIMED:
      return MakeTimed(scheduler);
    default:
      return std::make_unique<Eager>(scheduler);
  }
}

}  // namespace ascendsim

// Schedules that look for races where `lazy` cannot.
//
// `lazy` runs a side stream's task when the main stream asks for it, so never too early: a wait of
// a side stream for the main one may be missing and not be missed. `early` is its opposite.
#include <random>
#include <vector>

#include "common.h"
#include "schedules.h"

namespace ascendsim {
namespace {

bool CanRun(const Stream& stream) {
  return !stream.busy && !stream.queue.empty() && stream.queue.front().after.Reached();
}

// A side stream's task runs as soon as what it waits for is reached, a main stream's only when a
// synchronisation, or a side stream that one asks for, needs it.
class Early final : public Schedule {
 public:
  explicit Early(Scheduler& scheduler) : scheduler_(scheduler) {}

  void Submitted(Lock& lock, const StreamRef&) override { RunSides(lock); }

  // After each task of a main stream, the side streams go as far as that lets them.
  void Await(Lock& lock, const Point& goal) override {
    while (!goal.Reached()) {
      scheduler_.RunNext(lock, goal);
      RunSides(lock);
    }
  }

  // As in `lazy`: the caching allocators query on every allocation.
  void Polled(Lock& lock, const Point& goal, uint64_t times) override {
    if (times >= Settings().query_stall) Await(lock, {goal.stream, goal.stream->finished + 1});
  }

 private:
  void RunSides(Lock& lock) {
    while (const auto stream = AnySide()) scheduler_.RunFront(lock, stream);
  }

  StreamRef AnySide() const {
    for (const auto& [id, stream] : scheduler_.Streams()) {
      if (!stream->main && CanRun(*stream)) return stream;
    }
    return nullptr;
  }

  Scheduler& scheduler_;
};

// After a submission as many tasks run as a coin falls heads in a row, each of a stream that is
// drawn from those that can: on average one, so that the device is now far behind, now up to date.
// A favourite is preferred for a while, so that one stream can get far ahead of the others.
class Random final : public Schedule {
 public:
  explicit Random(Scheduler& scheduler) : scheduler_(scheduler) { Reseed(); }

  void Reseed() override {
    generator_.seed(Settings().seed);
    favourite_ = 0;
  }

  void Submitted(Lock& lock, const StreamRef&) override {
    while (OneIn(2) && RunAny(lock)) continue;
  }

  void Await(Lock& lock, const Point& goal) override {
    while (!goal.Reached()) {
      if (!RunAny(lock)) scheduler_.WaitForChange(lock);  // all that can run does, on other threads
    }
  }

  void Polled(Lock& lock, const Point& goal, uint64_t times) override {
    if (times >= Settings().query_stall) Await(lock, {goal.stream, goal.stream->finished + 1});
  }

 private:
  static constexpr uint64_t kReignOfFavourite = 8, kFavouriteYields = 4;

  // The generator's output is the same everywhere; the library's distributions are not.
  bool OneIn(uint64_t n) { return generator_() % n == 0; }

  bool RunAny(Lock& lock) {
    std::vector<StreamRef> ready;
    for (const auto& [id, stream] : scheduler_.Streams()) {
      if (CanRun(*stream)) ready.push_back(stream);
    }
    if (ready.empty()) return false;
    StreamRef chosen = ready[generator_() % ready.size()];
    if (OneIn(kReignOfFavourite)) favourite_ = chosen->id;
    for (const auto& stream : ready) {
      if (stream->id == favourite_ && !OneIn(kFavouriteYields)) chosen = stream;
    }
    scheduler_.RunFront(lock, chosen);
    return true;
  }

  Scheduler& scheduler_;
  std::mt19937_64 generator_;
  int favourite_ = 0;  // a stream's number
};

}  // namespace

std::unique_ptr<Schedule> MakeEarly(Scheduler& scheduler) {
  return std::make_unique<Early>(scheduler);
}

std::unique_ptr<Schedule> MakeRandom(Scheduler& scheduler) {
  return std::make_unique<Random>(scheduler);
}

}  // namespace ascendsim

using namespace ascendsim;

void ascendsim_reseed() { Scheduler::Get().Reseed(); }

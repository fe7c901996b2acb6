#include "demand.h"

#include <algorithm>
#include <chrono>
#include <list>
#include <optional>
#include <thread>
#include <utility>

#include "../runtime/common.h"

namespace ascendsim::hccl {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kEvery = 2ms;
constexpr auto kQuiet = 50ms;   // nothing has happened in this process for so long,
constexpr auto kAtLatest = 1s;  // or a peer has waited for so long
// In schedule `timed` the clock passes the host's when a task is served: only where the host waits
// elsewhere, and not where it is slow.
constexpr auto kQuietTimed = 2s;

struct Pending {
  Point point;
  std::function<bool()> wanted;
  std::optional<Clock::time_point> since;  // it was seen to be wanted
};

// Notices whether this process submits and finishes tasks.
class Activity {
 public:
  Clock::time_point QuietSince() {
    const auto now = Look();
    if (now != last_) {
      last_ = now;
      since_ = Clock::now();
    }
    return since_;
  }

  // What happened until now was our own doing.
  void Forget() { last_ = Look(); }

 private:
  using State = std::pair<uint64_t, uint64_t>;
  static State Look() { return {Scheduler::Get().Submitted(), Scheduler::Get().Pending()}; }

  State last_{};
  Clock::time_point since_ = Clock::now();
};

class Demand {
 public:
  static Demand& Get() {
    static auto* demand = new Demand;
    return *demand;
  }

  void Add(Pending pending) {
    const Lock lock(mutex_);
    pending_.push_back(std::move(pending));
    if (!serving_) std::thread([this] { Serve(); }).detach();
    serving_ = true;
    added_.notify_one();
  }

 private:
  // Each task gets a thread: one that must wait for a third rank keeps no other from running.
  void Serve() {
    while (true) {
      if (const auto point = Due()) {
        std::thread([this, point] { Run(*point); }).detach();
      } else {
        std::this_thread::sleep_for(kEvery);
      }
    }
  }

  void Run(const Point& point) {
    Scheduler::Get().Serve(point);
    const Lock lock(mutex_);
    activity_.Forget();
  }

  // The oldest task that must run now, once. Sleeps while nothing is pending.
  std::optional<Point> Due() {
    Lock lock(mutex_);
    added_.wait(lock, [this] { return !pending_.empty(); });
    pending_.remove_if([](const Pending& p) { return Scheduler::Get().Reached(p.point); });
    const bool timed = Settings().schedule == ASCENDSIM_TIMED;
    const auto quiet_since = activity_.QuietSince(), now = Clock::now();
    for (auto pending = pending_.begin(); pending != pending_.end(); ++pending) {
      if (!pending->wanted()) continue;
      if (!pending->since) pending->since = now;
      const auto waited = now - *pending->since;
      const Clock::duration enough = timed ? Clock::duration(kQuietTimed) : kQuiet;
      const bool quiet = waited > enough && now - quiet_since > enough;
      if (!quiet && (timed || waited <= kAtLatest)) continue;
      const Point point = pending->point;
      pending_.erase(pending);
      return point;
    }
    return std::nullopt;
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::list<Pending> pending_;
  bool serving_ = false;
  Activity activity_;
};

}  // namespace

void RunOnDemand(const Point& point, std::function<bool()> wanted) {
  Demand::Get().Add({point, std::move(wanted), {}});
}

}  // namespace ascendsim::hccl

#include "scheduler.h"

#include <algorithm>
#include <utility>

#include "common.h"
#include "faults.h"
#include "schedules.h"

namespace ascendsim {

bool Point::Reached() const { return !stream || stream->finished >= ticket; }

Scheduler& Scheduler::Get() {
  static auto* scheduler = new Scheduler;
  return *scheduler;
}

Scheduler::Scheduler() {
  FixSettings();
  schedule_ = MakeSchedule(*this);
}

StreamRef Scheduler::CreateStream(int device) {
  const Lock lock(mutex_);
  auto stream = std::make_shared<Stream>();
  stream->id = next_id_++;
  stream->device = device;
  stream->main = std::none_of(streams_.begin(), streams_.end(), [device](const auto& numbered) {
    return numbered.second->device == device;
  });
  handles_[stream.get()] = stream;
  streams_[stream->id] = stream;
  return stream;
}

StreamRef Scheduler::DefaultStream(int device) {
  {
    const Lock lock(mutex_);
    const auto found = defaults_.find(device);
    if (found != defaults_.end()) return found->second;
  }
  auto stream = CreateStream(device);
  const Lock lock(mutex_);
  return defaults_.emplace(device, stream).first->second;
}

StreamRef Scheduler::FindStream(void* handle) {
  if (!handle) return DefaultStream(CurrentDevice());
  const Lock lock(mutex_);
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second;
}

void Scheduler::DestroyStream(const StreamRef& stream) {
  Await(stream);
  {
    const Lock lock(mutex_);
    handles_.erase(stream.get());
    streams_.erase(stream->id);
    stream->stopping = true;
    stream->wake.notify_all();
  }
  if (stream->worker.joinable()) stream->worker.join();
}

Point Scheduler::Push(const StreamRef& stream, Task task) {
  task.order = ++submitted_;
  ++stream->submitted;
  stream->queries = 0;
  races_.Submitted({task.name, stream->id, stream->submitted}, stream->known, task.accesses);
  stream->queue.push_back(std::move(task));
  return {stream, stream->submitted};
}

Point Scheduler::Submit(const StreamRef& stream, Task task) {
  Lock lock(mutex_);
  auto point = Push(stream, std::move(task));
  schedule_->Submitted(lock, stream);
  return point;
}

void Scheduler::Record(const StreamRef& stream, const EventRef& event) {
  Lock lock(mutex_);
  auto stamp = [this, event] {
    const Lock inner(mutex_);
    event->finished_ns = schedule_->Nanoseconds();
  };
  event->last =
      Push(stream,
           {.name = "record", .run = std::move(stamp), .after = {}, .kind = ASCENDSIM_KIND_RECORD});
  event->queries = 0;
  event->known = stream->known;
  schedule_->Submitted(lock, stream);
}

void Scheduler::MakeWait(const StreamRef& stream, const EventRef& event) {
  Lock lock(mutex_);
  races_.Learn(stream->known, event->known);
  Push(stream, {.name = "wait", .run = {}, .after = event->last, .kind = ASCENDSIM_KIND_WAIT});
  schedule_->Submitted(lock, stream);
}

void Scheduler::Await(const StreamRef& stream) {
  Lock lock(mutex_);
  races_.HostLearns(stream->known);
  schedule_->Await(lock, {stream, stream->submitted});
}

void Scheduler::Await(const EventRef& event) {
  Lock lock(mutex_);
  races_.HostLearns(event->known);
  schedule_->Await(lock, Point(event->last));
}

void Scheduler::Settle(const StreamRef& stream) {
  Lock lock(mutex_);
  schedule_->Await(lock, {stream, stream->submitted});
}

void Scheduler::Serve(const Point& goal) {
  Lock lock(mutex_);
  schedule_->Serve(lock, goal);
}

void Scheduler::AwaitEach(const std::function<bool(const Stream&)>& chosen) {
  Lock lock(mutex_);
  std::vector<Point> goals;
  for (const auto& [id, stream] : streams_) {
    if (!chosen(*stream)) continue;
    races_.HostLearns(stream->known);
    goals.push_back({stream, stream->submitted});
  }
  for (const auto& goal : goals) schedule_->Await(lock, goal);
}

void Scheduler::AwaitDevice(int device) {
  AwaitEach([device](const Stream& stream) { return stream.device == device; });
}

void Scheduler::AwaitAll() {
  AwaitEach([](const Stream&) { return true; });
}

bool Scheduler::Query(const StreamRef& stream) {
  Lock lock(mutex_);
  const Point goal{stream, stream->submitted};
  if (!goal.Reached()) schedule_->Polled(lock, goal, ++stream->queries);
  if (goal.Reached()) races_.HostLearns(stream->known);
  return goal.Reached();
}

bool Scheduler::Query(const EventRef& event) {
  Lock lock(mutex_);
  const Point goal = event->last;
  if (!goal.Reached()) schedule_->Polled(lock, goal, ++event->queries);
  if (goal.Reached()) races_.HostLearns(event->known);
  return goal.Reached();
}

bool Scheduler::Reached(const Point& goal) {
  const Lock lock(mutex_);
  return goal.Reached();
}

uint64_t Scheduler::FinishedNanoseconds(const EventRef& event) {
  const Lock lock(mutex_);
  return event->finished_ns;
}

uint64_t Scheduler::Submitted() {
  const Lock lock(mutex_);
  return submitted_;
}

uint64_t Scheduler::Pending() {
  const Lock lock(mutex_);
  uint64_t pending = 0;
  for (const auto& [id, stream] : streams_) pending += stream->submitted - stream->finished;
  return pending;
}

void Scheduler::Reseed() {
  const Lock lock(mutex_);
  schedule_->Reseed();
}

std::vector<AscendsimRace> Scheduler::TakeRaces() {
  const Lock lock(mutex_);
  return races_.Take();
}

void Scheduler::RunFront(Lock& lock, const StreamRef& stream) {
  Task task = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->busy = true;
  if (task.run) {
    lock.unlock();
    if (!HasStopped(stream->device)) task.run();
    task.run = nullptr;  // what it holds is released without the lock
    lock.lock();
  }
  Finish(stream);
}

void Scheduler::Finish(const StreamRef& stream) {
  ++stream->finished;
  stream->busy = false;
  changed_.notify_all();
  for (const auto& [id, other] : streams_) {
    if (!other->queue.empty() && other->queue.front().after.stream == stream) {
      other->wake.notify_one();
    }
  }
}

// What holds a stream up is its front task, and what holds that up is a stream's front task again:
// no cycle is possible, so the chain ends at a task that can run.
void Scheduler::RunNext(Lock& lock, Point goal) {
  while (!goal.stream->busy && !goal.stream->queue.front().after.Reached()) {
    // A copy of both: the queue changes whenever the lock is released.
    goal = Point(goal.stream->queue.front().after);
  }
  if (goal.stream->busy) {  // on another thread
    WaitForChange(lock);
  } else {
    RunFront(lock, goal.stream);
  }
}

// Runs the stream up to `goal`, and of other streams exactly what that depends on.
void Scheduler::RunUntil(Lock& lock, const Point& goal) {
  while (!goal.Reached()) RunNext(lock, goal);
}

}  // namespace ascendsim

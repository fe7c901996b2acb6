#include "scheduler.h"

#include <utility>

#include "common.h"

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
  streams_[stream.get()] = stream;
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
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second;
}

void Scheduler::DestroyStream(const StreamRef& stream) {
  Await(stream);
  {
    const Lock lock(mutex_);
    streams_.erase(stream.get());
    stream->stopping = true;
    stream->wake.notify_all();
  }
  if (stream->worker.joinable()) stream->worker.join();
}

Point Scheduler::Push(const StreamRef& stream, Task task) {
  stream->queue.push_back(std::move(task));
  stream->queries = 0;
  ++submitted_;
  return {stream, ++stream->submitted};
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
    event->finished_ns = NowNanoseconds();
  };
  event->last = Push(stream, {.name = "record", .run = std::move(stamp), .after = {}});
  event->queries = 0;
  schedule_->Submitted(lock, stream);
}

void Scheduler::MakeWait(const StreamRef& stream, const EventRef& event) {
  Lock lock(mutex_);
  if (event->last.Reached()) return;
  Push(stream, {.name = "wait", .run = {}, .after = event->last});
  schedule_->Submitted(lock, stream);
}

void Scheduler::Await(const StreamRef& stream) {
  Lock lock(mutex_);
  schedule_->Await(lock, {stream, stream->submitted});
}

void Scheduler::Await(const EventRef& event) {
  Lock lock(mutex_);
  schedule_->Await(lock, Point(event->last));
}

void Scheduler::Await(const Point& goal) {
  Lock lock(mutex_);
  schedule_->Await(lock, goal);
}

void Scheduler::AwaitEach(const std::function<bool(const Stream&)>& chosen) {
  Lock lock(mutex_);
  std::vector<Point> goals;
  for (const auto& [handle, stream] : streams_) {
    if (chosen(*stream)) goals.push_back({stream, stream->submitted});
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
  return goal.Reached();
}

bool Scheduler::Query(const EventRef& event) {
  Lock lock(mutex_);
  const Point goal = event->last;
  if (!goal.Reached()) schedule_->Polled(lock, goal, ++event->queries);
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
  for (const auto& [handle, stream] : streams_) pending += stream->submitted - stream->finished;
  return pending;
}

void Scheduler::RunFront(Lock& lock, const StreamRef& stream) {
  Task task = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->busy = true;
  if (task.run) {
    lock.unlock();
    task.run();
    task.run = nullptr;  // what it holds is released without the lock
    lock.lock();
  }
  Finish(stream);
}

void Scheduler::Finish(const StreamRef& stream) {
  ++stream->finished;
  stream->busy = false;
  changed_.notify_all();
  for (const auto& [handle, other] : streams_) {
    if (!other->queue.empty() && other->queue.front().after.stream == stream) {
      other->wake.notify_one();
    }
  }
}

// Runs the stream up to `goal`, and of other streams exactly what that depends on. A stream's front
// task is the only one that can hold it up, so the recursion is at most as deep as there are
// streams.
void Scheduler::RunUntil(Lock& lock, const Point& goal) {
  while (!goal.Reached()) {
    if (goal.stream->busy) {  // on another thread
      WaitForChange(lock);
      continue;
    }
    // A copy: the queue changes whenever the lock is released.
    const Point after = goal.stream->queue.front().after;
    if (after.Reached()) {
      RunFront(lock, goal.stream);
    } else {
      RunUntil(lock, after);
    }
  }
}

}  // namespace ascendsim

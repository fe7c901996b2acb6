// Streams and events.
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "common.h"
#include "faults.h"
#include "scheduler.h"

namespace ascendsim {
namespace {

// Finds the event behind a handle. A destroyed event lives on in the tasks that refer to it.
class Events {
 public:
  void* Create() {
    auto event = std::make_shared<Event>();
    const std::lock_guard lock(mutex_);
    events_[event.get()] = event;
    return event.get();
  }

  void Destroy(void* handle) {
    const std::lock_guard lock(mutex_);
    events_.erase(handle);
  }

  EventRef Find(void* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(handle);
    return found == events_.end() ? nullptr : found->second;
  }

  static Events& Get() {
    static auto* events = new Events;
    return *events;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, EventRef> events_;
};

int UnknownHandle(const char* function) {
  return Fail(kBadParameter, std::string(function) + ": unknown stream or event");
}

int DeviceOf(const EventRef& event) {
  return event->last.stream ? event->last.stream->device : CurrentDevice();
}

int SynchroniseStream(void* handle, const char* function) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!stream) return UnknownHandle(function);
  Count(&AscendsimCounters::synchronisations);
  Scheduler::Get().Await(stream);
  return ErrorOf(stream->device);
}

int SynchroniseDevice() {
  Count(&AscendsimCounters::synchronisations);
  Scheduler::Get().AwaitDevice(CurrentDevice());
  return ErrorOf(CurrentDevice());
}

}  // namespace
}  // namespace ascendsim

using namespace ascendsim;

// Streams. torch_npu makes one default stream per device and pools of others, asks for their
// number, and destroys none before the process ends.
ASCENDSIM_API int aclrtCreateStream(void** handle) {
  *handle = Scheduler::Get().CreateStream(CurrentDevice()).get();
  return kOk;
}

ASCENDSIM_API int aclrtCreateStreamWithConfig(void** handle, uint32_t, uint32_t) {
  return aclrtCreateStream(handle);
}

ASCENDSIM_API int aclrtDestroyStream(void* handle) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!handle || !stream) return UnknownHandle("aclrtDestroyStream");
  Scheduler::Get().DestroyStream(stream);
  return kOk;
}

ASCENDSIM_API int aclrtDestroyStreamForce(void* handle) { return aclrtDestroyStream(handle); }

ASCENDSIM_API int aclrtStreamGetId(void* handle, int* id) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!stream) return UnknownHandle("aclrtStreamGetId");
  *id = stream->id;
  return kOk;
}

// What a stream does when a task fails: 0, it goes on; 1, its whole context stops (faults.h).
ASCENDSIM_API int aclrtSetStreamFailureMode(void* handle, uint64_t mode) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!handle || !stream) return UnknownHandle("aclrtSetStreamFailureMode");
  if (mode == 1) StopOnFailure(stream->device);
  return kOk;
}

// 0 when all that was submitted has finished, 1 when not.
ASCENDSIM_API int aclrtStreamQuery(void* handle, int* status) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!stream) return UnknownHandle("aclrtStreamQuery");
  *status = Scheduler::Get().Query(stream) ? 0 : 1;
  return kOk;
}

// The host waits. An error of a task that ran on the device is returned here; torch_npu adds the text
// of aclGetRecentErrMsg to the exception. Time-outs are not simulated: what waits for another stream
// always ends.
ASCENDSIM_API int aclrtSynchronizeStream(void* handle) {
  return SynchroniseStream(handle, "aclrtSynchronizeStream");
}

ASCENDSIM_API int aclrtSynchronizeStreamWithTimeout(void* handle, int) {
  return SynchroniseStream(handle, "aclrtSynchronizeStreamWithTimeout");
}

ASCENDSIM_API int aclrtSynchronizeDevice() { return SynchroniseDevice(); }

ASCENDSIM_API int aclrtSynchronizeDeviceWithTimeout(int) { return SynchroniseDevice(); }

// Events. torch_npu creates them with flags for timing, synchronisation or both; all serve here.
// One that was never recorded counts as reached.
ASCENDSIM_API int aclrtCreateEventWithFlag(void** handle, uint32_t) {
  *handle = Events::Get().Create();
  return kOk;
}

ASCENDSIM_API int aclrtCreateEventExWithFlag(void** handle, uint32_t flag) {
  return aclrtCreateEventWithFlag(handle, flag);
}

ASCENDSIM_API int aclrtDestroyEvent(void* handle) {
  Events::Get().Destroy(handle);
  return kOk;
}

ASCENDSIM_API int aclrtRecordEvent(void* event_handle, void* stream_handle) {
  const auto event = Events::Get().Find(event_handle);
  const auto stream = Scheduler::Get().FindStream(stream_handle);
  if (!event || !stream) return UnknownHandle("aclrtRecordEvent");
  Scheduler::Get().Record(stream, event);
  return kOk;
}

ASCENDSIM_API int aclrtStreamWaitEvent(void* stream_handle, void* event_handle) {
  const auto event = Events::Get().Find(event_handle);
  const auto stream = Scheduler::Get().FindStream(stream_handle);
  if (!event || !stream) return UnknownHandle("aclrtStreamWaitEvent");
  Scheduler::Get().MakeWait(stream, event);
  return kOk;
}

// Called before an event is recorded anew, which is no matter here: see Point.
ASCENDSIM_API int aclrtResetEvent(void*, void*) { return kOk; }

ASCENDSIM_API int aclrtSynchronizeEvent(void* handle) {
  const auto event = Events::Get().Find(handle);
  if (!event) return UnknownHandle("aclrtSynchronizeEvent");
  Count(&AscendsimCounters::synchronisations);
  Scheduler::Get().Await(event);
  return ErrorOf(DeviceOf(event));
}

// 1 when reached, 0 when not. The caching allocators ask on every allocation whether a block that
// another stream uses is free again.
ASCENDSIM_API int aclrtQueryEventStatus(void* handle, int* status) {
  const auto event = Events::Get().Find(handle);
  if (!event) return UnknownHandle("aclrtQueryEventStatus");
  Count(&AscendsimCounters::event_queries);
  *status = Scheduler::Get().Query(event) ? 1 : 0;
  return kOk;
}

// The same with 0 when reached and 1 when not.
ASCENDSIM_API int aclrtQueryEventWaitStatus(void* handle, int* status) {
  const int code = aclrtQueryEventStatus(handle, status);
  *status = *status ? 0 : 1;
  return code;
}

ASCENDSIM_API int aclrtEventElapsedTime(float* milliseconds, void* from, void* to) {
  const auto first = Events::Get().Find(from), second = Events::Get().Find(to);
  if (!first || !second) return UnknownHandle("aclrtEventElapsedTime");
  const auto begin = static_cast<int64_t>(Scheduler::Get().FinishedNanoseconds(first));
  const auto end = static_cast<int64_t>(Scheduler::Get().FinishedNanoseconds(second));
  *milliseconds = static_cast<float>(end - begin) / 1e6F;
  return kOk;
}

ASCENDSIM_API int aclrtEventGetTimestamp(void* handle, uint64_t* microseconds) {
  const auto event = Events::Get().Find(handle);
  if (!event) return UnknownHandle("aclrtEventGetTimestamp");
  *microseconds = Scheduler::Get().FinishedNanoseconds(event) / 1000;
  return kOk;
}

// Host functions in stream order: what a simulated kernel is, too (tasks.h).
ASCENDSIM_API int aclrtLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  const auto stream = Scheduler::Get().FindStream(handle);
  if (!stream) return UnknownHandle("aclrtLaunchHostFunc");
  if (HasStopped(stream->device)) return ErrorOf(stream->device);
  auto run = [=] { function(argument); };
  Scheduler::Get().Submit(
      stream, {.name = "host", .run = std::move(run), .after = {}, .kind = ASCENDSIM_KIND_HOST});
  return kOk;
}

ASCENDSIM_API int aclrtLaunchCallback(void (*function)(void*), void* argument, int, void* stream) {
  return aclrtLaunchHostFunc(stream, function, argument);
}

// torch_npu runs a thread that serves callbacks; ours need none, so the thread only sleeps.
ASCENDSIM_API int aclrtSubscribeReport(uint64_t, void*) { return kOk; }

ASCENDSIM_API int aclrtUnSubscribeReport(uint64_t, void*) { return kOk; }

ASCENDSIM_API int aclrtProcessReport(int) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return kOk;
}

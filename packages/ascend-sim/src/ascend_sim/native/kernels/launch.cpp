#include "launch.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "link.h"

namespace ascendsim::kernels {
namespace {

struct Task {
  const char* name;
  void* stream;
  bool fails;  // an injected fault strikes this kernel
  int threads;
  std::function<void()> body;
};

c10::DispatchKeySet below_the_user() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                              c10::DispatchKey::PythonDispatcher});
}

std::string fault_text(const char* name) {
  return std::string(name) + ": injected fault: the kernel failed on the device";
}

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

// Reductions split their work by the number of threads, so the result's bits depend on it: a task
// runs with the number that was in force where it was submitted.
class ThreadCount {
 public:
  explicit ThreadCount(int threads)
      : ambient_(at::get_num_threads()), differs_(ambient_ != threads) {
    if (differs_) at::set_num_threads(threads);
  }
  ~ThreadCount() {
    if (differs_) at::set_num_threads(ambient_);
  }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int ambient_;
  bool differs_;
};

void run_task(void* argument) {
  const auto* task = static_cast<const Task*>(argument);
  if (task->fails) {
    link().report_error(task->stream, fault_text(task->name).c_str());
    return;
  }
  try {
    ThreadCount threads(task->threads);
    HostDispatch host;
    task->body();
  } catch (const std::exception& error) {
    link().report_error(task->stream, (std::string(task->name) + ": " + text_of(error)).c_str());
  } catch (...) {
    link().report_error(task->stream, (std::string(task->name) + ": unknown error").c_str());
  }
}

void drop_task(void* argument) { delete static_cast<Task*>(argument); }

void enqueue(void* stream, const char* name, const Work& work, Task* task) {
  const std::vector<AscendsimAccess>& accesses = work.accesses();
  const AscendsimKernel kernel{
      .name = name,
      .run = task ? &run_task : nullptr,
      .argument = task,
      .drop = &drop_task,
      .flops = work.flops(),
      .bytes = work.bytes(),
      .flop_bytes = work.flop_bytes(),
      .accesses = accesses.data(),
      .access_count = accesses.size()};
  const int error = link().launch(stream, &kernel);
  TORCH_CHECK(error == 0, "[ascend-sim] ", name, " could not be enqueued: error ", error);
}

void raise_pending_error(void* stream) {
  char text[4096];
  if (link().error_of(stream, text, sizeof text) == 0) return;
  TORCH_CHECK(false, text);
}

}  // namespace

HostDispatch::HostDispatch()
    : guard_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), below_the_user()) {}

void launch(const char* name, c10::DeviceIndex device, const Work& work,
            std::function<void()> body) {
  void* stream = current_stream(device);
  raise_pending_error(stream);
  const bool fails = link().kernel_begins(name) != 0;
  auto* task = new Task{name, stream, fails, at::get_num_threads(), std::move(body)};
  enqueue(stream, name, work, task);  // may already have run and been dropped
}

void run_inline(const char* name, c10::DeviceIndex device, bool waits, const Work& work,
                const std::function<void()>& body) {
  void* stream = current_stream(device);
  raise_pending_error(stream);
  const bool fails = link().kernel_begins(name) != 0;
  enqueue(stream, name, work, /*task=*/nullptr);
  if (waits) {
    const int error = link().synchronize(stream);
    raise_pending_error(stream);
    TORCH_CHECK(error == 0, "[ascend-sim] ", name, ": synchronisation failed: error ", error);
  } else {
    link().settle(stream);
  }
  if (fails) link().report_error(stream, fault_text(name).c_str());
  raise_pending_error(stream);
  HostDispatch host;
  body();
}

}  // namespace ascendsim::kernels

// From an operator to a task on a stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>

#include "work.h"

namespace ascendsim::kernels {

// While it lives, operators on this thread go straight to the host's kernels: no autograd, no
// autocast, no mode that the user has entered. A lazy task runs inside whatever call forced it.
class HostDispatch {
 public:
  HostDispatch();

 private:
  c10::impl::ForceDispatchKeyGuard guard_;
};

// Both raise what an earlier task of the device reported, if one did.

// Enqueues `body` on the current stream of `device`. `body` captures aliases (host_alias), and
// no NPU tensor: that would keep memory alive which the program has freed. `name` lives for ever.
void launch(const char* name, c10::DeviceIndex device, const Work& work,
            std::function<void()> body);

// Runs `body` at once, after everything on the current stream of `device`. `waits` says that the
// real operator waits too (its output's shape depends on data): then it counts as one
// synchronisation, otherwise the wait is the simulator's own. A task that does nothing stands on
// the stream for the time that `work` takes.
void run_inline(const char* name, c10::DeviceIndex device, bool waits, const Work& work,
                const std::function<void()>& body);

}  // namespace ascendsim::kernels

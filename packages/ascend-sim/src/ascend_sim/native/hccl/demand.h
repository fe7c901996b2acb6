// Runs what another rank waits for.
//
// On a device, what was submitted runs by itself. Under a schedule that runs tasks only when the
// host asks (`lazy`), a rank could otherwise wait for ever: for a peer whose part lies pending,
// while that peer's host waits for the first rank elsewhere, on gloo, say, or in making a group.
//
// A task that a peer waits for runs, with exactly what it depends on, once this process has been
// quiet for a while: nothing was submitted and nothing has finished. Before that, the host may be
// about to read what it has not waited for, and that must stay visible. A peer that has waited long
// is served in any case.
#pragma once

#include <functional>

#include "../runtime/scheduler.h"

namespace ascendsim::hccl {

// Lets the task that is reached with `point` run once `wanted` and the process is quiet.
void RunOnDemand(const Point& point, std::function<bool()> wanted);

}  // namespace ascendsim::hccl

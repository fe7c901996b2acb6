// The schedules: when a submitted task runs. A new one is a class, a maker here and a case in
// MakeSchedule.
#pragma once

#include <memory>

#include "scheduler.h"

namespace ascendsim {

// The one that the settings name.
std::unique_ptr<Schedule> MakeSchedule(Scheduler& scheduler);

std::unique_ptr<Schedule> MakeEarly(Scheduler& scheduler);
std::unique_ptr<Schedule> MakeRandom(Scheduler& scheduler);
std::unique_ptr<Schedule> MakeTimed(Scheduler& scheduler);

}  // namespace ascendsim

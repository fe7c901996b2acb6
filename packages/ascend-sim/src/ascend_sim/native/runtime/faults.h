// Counters, injected faults, and the errors of tasks that ran after their submission returned.
#pragma once

#include <string>

#include "common.h"

namespace ascendsim {

// Adds to a counter. Any thread may call it.
void Count(uint64_t AscendsimCounters::* counter, uint64_t amount = 1);

// One more occurrence of `fault`. True when an injected fault strikes it.
bool Strikes(AscendsimFault fault);

void ReportError(int device, std::string text);

// What a synchronisation with a device returns: kOk, or the device's oldest error, which is taken.
int TakeErrorOf(int device);

}  // namespace ascendsim

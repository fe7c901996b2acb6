// Counters, injected faults, and the errors of tasks that ran after their submission returned.
#pragma once

#include <string>

#include "common.h"

namespace ascendsim {

// Adds to a counter. Any thread may call it.
void Count(uint64_t AscendsimCounters::* counter, uint64_t amount = 1);

// One more occurrence of `fault`. True when an injected fault strikes it.
bool Strikes(AscendsimFault fault);

// [Note: a device that has stopped]
// torch_npu asks for ACL_STOP_ON_FAILURE on every stream that it makes. By CANN's documentation of
// aclrtSetStreamFailureMode a device of this kind then stops as a whole: once a task has failed, no
// later task of any stream in its context is executed, no new one is accepted, and every
// synchronisation returns the error. That ends only with aclrtResetDevice, which frees all memory of
// the device, so a program of torch's has no way on; ascendsim_take_error is the way of tests. Where
// nobody asked for the mode, an error is returned once, and what follows is executed.
//
// What was queued and is not executed counts as finished here, so that no query waits for ever, and
// events are still recorded and waited for. Whether a device does the same is not known.

// From now on the device stops when one of its tasks fails.
void StopOnFailure(int device);

// A task of the device failed. What fails beside the first of a device that stops is not told.
void ReportError(int device, std::string text);

// Whether a task has failed and the tasks of the device are not executed any more.
bool HasStopped(int device);

// Ends that, and forgets what the device has to report.
void ResetFailures(int device);

// What a synchronisation with a device returns: kOk, or the device's oldest error. It is taken,
// unless the device has stopped.
int ErrorOf(int device);

}  // namespace ascendsim

// Included before every file that needs torch, and compiled once for all of them: torch's headers
// take longer to read than our code to compile. (No #pragma once: GCC warns of it in what it takes
// for a main file.)
#ifndef ASCENDSIM_PREFIX_H_
#define ASCENDSIM_PREFIX_H_

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <unordered_map>
#include <vector>

#endif

// What the simulator must know of an operator, read once from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace ascendsim::kernels {

struct Signature {
  explicit Signature(const c10::OperatorHandle& op);

  std::string name;  // namespace::name.overload
  size_t arguments;
  size_t returns;
  std::vector<int> returned;  // per return: the written argument that it is, or -1
  std::vector<bool> written;  // per argument
  std::vector<bool> out;      // per argument: out=, which the kernel may resize
  int generator = -1;         // the argument's position
  bool only_writes = true;    // every return is a written argument
  bool resizes = false;       // it has out= arguments
  bool tensor_tuple = false;  // more than one tensor is new
  bool waits = false;         // the result's shape or value depends on data
  bool takes_host_indices = false;
};

// namespace::name.overload
std::string full_name(const c10::OperatorName& name);

}  // namespace ascendsim::kernels

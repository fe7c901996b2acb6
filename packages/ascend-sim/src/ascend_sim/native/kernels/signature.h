// What the simulator must know of an operator, read once from its schema.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

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
  std::vector<bool> indices;  // per argument: the indices of an indexing operator

  // Whether the shape or value of a result depends on data in this call: the host has to wait.
  bool waits(const torch::jit::Stack& arguments) const;

  // Whether `t` may lie on the host: an index, or a scalar that is only read.
  bool may_be_on_host(size_t argument, const at::Tensor& t) const;

 private:
  enum class Waits { kNever, kForMasks, kWithoutSize, kAlways };

  Waits waits_ = Waits::kNever;
  int output_size_ = -1;  // the position of the argument that tells what data would decide
};

// namespace::name.overload
std::string full_name(const c10::OperatorName& name);

}  // namespace ascendsim::kernels

// Which device an operator runs on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace ascendsim::kernels {

// The one device that all tensors of an operator share. Every kernel asks for it before it makes an
// alias: a task must touch no memory that the host may have freed by then.
class CommonDevice {
 public:
  // `name` of the operator is what an error says.
  explicit CommonDevice(std::string name) : name_(std::move(name)) {}

  // Raises torch's error when `t` lies elsewhere than a tensor before it. Ignores undefined ones.
  void add(const at::Tensor& t);

  // Nothing without tensors.
  const std::optional<c10::Device>& get() const { return device_; }

 private:
  const std::string name_;
  std::optional<c10::Device> device_;
};

}  // namespace ascendsim::kernels

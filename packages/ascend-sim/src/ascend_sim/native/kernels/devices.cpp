#include "devices.h"

#include <c10/util/Exception.h>

namespace ascendsim::kernels {

void CommonDevice::add(const at::Tensor& t) {
  if (!t.defined()) return;
  if (!device_) device_ = t.device();
  TORCH_CHECK(*device_ == t.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *device_, " and ", t.device(), "! (when running ", name_, ")");
}

}  // namespace ascendsim::kernels

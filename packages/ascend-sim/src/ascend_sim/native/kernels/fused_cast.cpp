// npu_format_cast, npu_dtype_cast and npu_reshape. The simulated memory has one format, the plain
// one (ND).
#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "alias.h"
#include "devices.h"
#include "fused.h"
#include "launch.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;

constexpr std::array<int64_t, 3> kPlainFormats{-1, 0, 2};  // undefined, NCHW, ND
constexpr std::array<int64_t, 16> kPrivateFormats{1,  3,  4,  12, 16, 27, 29, 30,
                                                  32, 35, 47, 50, 51, 52, 53, 54};

template <size_t size>
bool is_one_of(const std::array<int64_t, size>& formats, int64_t format) {
  return std::find(formats.begin(), formats.end(), format) != formats.end();
}

// Whether the format is the one that the simulated memory has. Raises when ACL knows none such.
bool is_plain(int64_t format) {
  const bool plain = is_one_of(kPlainFormats, format);
  TORCH_CHECK(plain || is_one_of(kPrivateFormats, format), "npu_format_cast: there is no format ",
              format, " (torch_npu.Format names those there are)");
  return plain;
}

// As torch_npu's: the tensor itself where it has the format, else a new one. A private format such
// as FRACTAL_NZ gets a new tensor in the plain layout, whose size is not padded.
Tensor format_cast(const Tensor& input, int64_t format, std::optional<int64_t>,
                   std::optional<int64_t>) {
  return is_plain(format) ? input : input.clone();
}

// The simulated tensor `like` can only have the plain format.
Tensor format_cast_like(const Tensor& input, const Tensor&, std::optional<int64_t>,
                        std::optional<int64_t>) {
  return input;
}

Tensor& format_cast_(Tensor& input, int64_t format, std::optional<int64_t>,
                     std::optional<int64_t>) {
  is_plain(format);  // raises for what is none
  return input;
}

Tensor& format_cast_like_(Tensor& input, const Tensor&, std::optional<int64_t>,
                          std::optional<int64_t>) {
  return input;
}

Tensor copied(const Tensor& input, int64_t) { return input.clone(); }
Tensor copied_custom(const Tensor& input, int64_t, int64_t) { return input.clone(); }
Tensor copied_input(const Tensor& input, int64_t, int64_t, int64_t) { return input.clone(); }

Tensor dtype_cast(const Tensor& input, at::ScalarType dtype) {
  return input.to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

// torch_npu's copy between two devices ends here, so the tensors may be on different ones. As
// there, the source's stream does it.
Tensor& reshape_out(const Tensor& input, at::IntArrayRef shape, bool, Tensor& out) {
  if (!is_npu(input) || !is_npu(out)) {
    CommonDevice device("npu::npu_reshape.out");
    device.add(input);
    device.add(out);
  }
  auto body = [from = host_alias(input), sizes = shape.vec(), to = host_alias(out)] {
    to.copy_(from.reshape(sizes));
  };
  Work work;
  work.read(input);
  work.write(out);
  launch("npu::npu_reshape.out", input.device().index(), work, std::move(body));
  return out;
}

}  // namespace

void append_casts(std::vector<HostKernel>& kernels) {
  kernels.push_back(host_kernel("npu::_npu_format_cast", &copied));
  kernels.push_back(host_kernel("npu::_npu_format_cast.aclnn", &copied_custom));
  kernels.push_back(host_kernel("npu::_npu_format_cast.input_dtype", &copied_input));
  kernels.push_back(host_kernel("npu::_npu_dtype_cast", &dtype_cast));
  kernels.push_back(host_kernel("npu::_npu_dtype_cast_backward", &dtype_cast));
}

std::vector<std::string> register_formats(torch::Library& npu) {
  npu.impl("npu_format_cast", TORCH_FN(format_cast));
  npu.impl("npu_format_cast.Tensor", TORCH_FN(format_cast_like));
  npu.impl("npu_format_cast_", TORCH_FN(format_cast_like_));
  npu.impl("npu_format_cast_.acl_format", TORCH_FN(format_cast_));
  npu.impl("npu_reshape.out", TORCH_FN(reshape_out));
  return {"npu::npu_format_cast", "npu::npu_format_cast.Tensor", "npu::npu_format_cast_",
          "npu::npu_format_cast_.acl_format", "npu::npu_reshape.out"};
}

}  // namespace ascendsim::kernels

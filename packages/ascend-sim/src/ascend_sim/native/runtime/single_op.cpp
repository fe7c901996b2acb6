// The interface for a single operator by name. torch_npu's older operators go through it, among
// them two that its process group needs: Fill and PadV3. Others are refused with their name.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "scheduler.h"

namespace ascendsim {
namespace {

struct TensorDesc {
  int dtype;
  int format;
  std::vector<int64_t> dims;

  size_t Elements() const {
    size_t product = 1;
    for (const int64_t size : dims) product *= size;
    return product;
  }
};

struct DataBuffer {
  char* data;
};

struct Attributes {};

const TensorDesc& Desc(const void* desc) { return *static_cast<const TensorDesc*>(desc); }
char* Data(const void* buffer) { return static_cast<const DataBuffer*>(buffer)->data; }

size_t ElementSize(int dtype) {
  switch (dtype) {
    case 0:
    case 3:
    case 8:  // float, int32, uint32
      return 4;
    case 1:
    case 6:
    case 7:
    case 27:  // float16, int16, uint16, bfloat16
      return 2;
    case 9:
    case 10:
    case 11:  // int64, uint64, double
      return 8;
    default:  // int8, uint8, bool
      return 1;
  }
}

struct Call {
  const void* const* input_descs;
  const void* const* inputs;
  const void* const* output_descs;
  void* const* outputs;
  void* stream;
};

int Submit(const Call& call, const char* name, std::function<void()> run) {
  const auto stream = Scheduler::Get().FindStream(call.stream);
  if (!stream) return Fail(kBadParameter, std::string(name) + ": unknown stream");
  const TensorDesc& desc = Desc(call.output_descs[0]);
  const size_t bytes = desc.Elements() * ElementSize(desc.dtype);
  Scheduler::Get().Submit(stream, {.name = name,
                                   .run = std::move(run),
                                   .after = {},
                                   .bytes = bytes,
                                   .accesses = {Access::Of(Data(call.outputs[0]), bytes, true)}});
  return kOk;
}

// Fill(dims, value): the process group clears its flat buffers with it.
int Fill(const Call& call) {
  const TensorDesc& desc = Desc(call.output_descs[0]);
  char* to = Data(call.outputs[0]);
  const char* value = Data(call.inputs[1]);
  const size_t count = desc.Elements(), size = ElementSize(desc.dtype);
  return Submit(call, "Fill", [=] {
    for (size_t i = 0; i < count; ++i) std::memcpy(to + i * size, value, size);
  });
}

// PadV3: only what the process group's alignment asks for, {1, n} with zeros added on the right.
int Pad(const Call& call) {
  const TensorDesc& from_desc = Desc(call.input_descs[0]);
  const TensorDesc& to_desc = Desc(call.output_descs[0]);
  if (from_desc.dims.size() != 2 || from_desc.dims[0] != 1 || to_desc.dims[0] != 1) {
    return Fail(kInternal, "PadV3 is simulated for {1, n} with padding on the right alone");
  }
  const size_t size = ElementSize(from_desc.dtype);
  const size_t kept = from_desc.Elements() * size, whole = to_desc.Elements() * size;
  char* to = Data(call.outputs[0]);
  const char* from = Data(call.inputs[0]);
  return Submit(call, "PadV3", [=] {
    std::memcpy(to, from, kept);
    std::memset(to + kept, 0, whole - kept);
  });
}

int Execute(const std::string& name, const Call& call) {
  if (name == "Fill") return Fill(call);
  if (name == "PadV3") return Pad(call);
  return Fail(kInternal, "operator " + name + " has no simulated kernel");
}

}  // namespace
}  // namespace ascendsim

using namespace ascendsim;

// Descriptors and buffers are real: torch_npu reads back what it has put in.
ASCENDSIM_API void* aclCreateTensorDesc(int dtype, int rank, const int64_t* dims, int format) {
  std::vector<int64_t> sizes(dims, dims + std::max(rank, 0));
  return new TensorDesc{dtype, format, std::move(sizes)};
}
ASCENDSIM_API void aclDestroyTensorDesc(const void* desc) { delete &Desc(desc); }
ASCENDSIM_API int aclGetTensorDescType(const void* desc) { return Desc(desc).dtype; }
ASCENDSIM_API int aclGetTensorDescFormat(const void* desc) { return Desc(desc).format; }
ASCENDSIM_API size_t aclGetTensorDescNumDims(const void* desc) { return Desc(desc).dims.size(); }
ASCENDSIM_API int aclGetTensorDescDimV2(const void* desc, size_t index, int64_t* size) {
  if (index >= Desc(desc).dims.size()) return Fail(kBadParameter, "no such dimension");
  *size = Desc(desc).dims[index];
  return kOk;
}
ASCENDSIM_API void aclSetTensorDescName(void*, const char*) {}
ASCENDSIM_API int aclSetTensorFormat(void*, int) { return kOk; }
ASCENDSIM_API int aclSetTensorPlaceMent(void*, int) { return kOk; }
ASCENDSIM_API int aclSetTensorShape(void*, int, const int64_t*) { return kOk; }
ASCENDSIM_API void* aclCreateDataBuffer(void* data, size_t) {
  return new DataBuffer{static_cast<char*>(data)};
}
ASCENDSIM_API int aclDestroyDataBuffer(const void* buffer) {
  delete static_cast<const DataBuffer*>(buffer);
  return kOk;
}

// Attributes are accepted and dropped: neither of the two operators has one.
ASCENDSIM_API void* aclopCreateAttr() { return new Attributes; }
ASCENDSIM_API void aclopDestroyAttr(const void* attributes) {
  delete static_cast<const Attributes*>(attributes);
}
ASCENDSIM_API int aclopSetAttrBool(void*, const char*, uint8_t) { return kOk; }
ASCENDSIM_API int aclopSetAttrInt(void*, const char*, int64_t) { return kOk; }
ASCENDSIM_API int aclopSetAttrFloat(void*, const char*, float) { return kOk; }
ASCENDSIM_API int aclopSetAttrDataType(void*, const char*, int) { return kOk; }
ASCENDSIM_API int aclopSetAttrString(void*, const char*, const char*) { return kOk; }
ASCENDSIM_API int aclopSetAttrListBool(void*, const char*, int, const uint8_t*) { return kOk; }
ASCENDSIM_API int aclopSetAttrListInt(void*, const char*, int, const int64_t*) { return kOk; }
ASCENDSIM_API int aclopSetAttrListFloat(void*, const char*, int, const float*) { return kOk; }
ASCENDSIM_API int aclopSetAttrListListInt(void*, const char*, int, const int*,
                                          const int64_t* const*) {
  return kOk;
}

ASCENDSIM_API int aclopCompileAndExecute(const char* name, int, const void* const* input_descs,
                                         const void* const* inputs, int,
                                         const void* const* output_descs, void* const* outputs,
                                         const void*, int, int, const char*, void* stream) {
  return Execute(name, {input_descs, inputs, output_descs, outputs, stream});
}

ASCENDSIM_API int aclopCompileAndExecuteV2(const char* name, int, void** input_descs, void** inputs,
                                           int, void** output_descs, void** outputs, void*, int,
                                           int, const char*, void* stream) {
  return Execute(
      name, {const_cast<const void* const*>(input_descs), const_cast<const void* const*>(inputs),
             const_cast<const void* const*>(output_descs), outputs, stream});
}

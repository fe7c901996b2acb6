#include "plan_key.h"

#include <ATen/core/Tensor.h>

#include "alias.h"

namespace ascendsim::kernels {
namespace {

template <class T>
void append_bytes(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class List>
void append_list(std::string& key, char kind, const List& list) {
  key += kind;
  append_bytes(key, list.size());
  for (const auto& value : list) append_bytes(key, value);
}

void append_tensor(std::string& key, const at::Tensor& t) {
  if (!t.defined()) {
    key += 'u';
    return;
  }
  key += is_npu(t) ? 'T' : 'C';
  key += static_cast<char>(t.scalar_type());
  key += static_cast<char>(t.dim());
  key += t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : '.';
  for (int64_t size : t.sizes()) append_bytes(key, size);
  for (int64_t stride : t.strides()) append_bytes(key, stride);
}

bool append_number(std::string& key, const c10::IValue& v, bool values) {
  if (v.isBool()) {
    key += v.toBool() ? 't' : 'f';
  } else if (v.isInt()) {
    key += 'i';
    if (values) append_bytes(key, v.toInt());
  } else if (v.isDouble()) {
    key += 'd';
    if (values) append_bytes(key, v.toDouble());
  } else if (v.isComplexDouble()) {
    key += 'c';
    if (values) append_bytes(key, v.toComplexDouble());
  } else {
    return false;
  }
  return true;
}

bool append_numbers(std::string& key, const c10::IValue& v, bool values) {
  if (v.isIntList()) {
    append_list(key, 'I', v.toIntVector());
  } else if (v.isDoubleList()) {
    const std::vector<double> list = v.toDoubleVector();
    values ? append_list(key, 'D', list) : append_list(key, 'D', std::vector<double>());
  } else if (v.isBoolList()) {
    key += 'B';
    for (bool b : v.toBoolList()) key += b ? 't' : 'f';
  } else if (v.isList()) {
    key += 'l';
    append_bytes(key, v.toListRef().size());
    for (const c10::IValue& item : v.toListRef()) {
      if (!append_number(key, item, values)) return false;
    }
  } else {
    return false;
  }
  return true;
}

bool append_value(std::string& key, const c10::IValue& v, bool values) {
  if (v.isTensor()) {
    append_tensor(key, v.toTensor());
  } else if (v.isTensorList() || v.isOptionalTensorList()) {
    key += 'L';
    for_each_tensor(v, [&](const at::Tensor& t) { append_tensor(key, t); });
  } else if (v.isNone()) {
    key += 'n';
  } else if (v.isString()) {
    key += 's';
    key += v.toStringRef();
    key += '\0';
  } else if (v.isDevice() || v.isGenerator()) {
    key += 'x';
  } else {
    return append_number(key, v, values) || append_numbers(key, v, values);
  }
  return true;
}

}  // namespace

bool append_key(const torch::jit::Stack& arguments, bool values, std::string& key) {
  for (const c10::IValue& value : arguments) {
    if (!append_value(key, value, values)) return false;
  }
  return true;
}

}  // namespace ascendsim::kernels

"""The operators by the operators of torch_npu. The only place of this package that imports it."""

"""The operators by Triton on CUDA: what launches the kernels of `_kernels.triton_kernels`."""

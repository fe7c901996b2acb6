"""The operators by Triton on CUDA: what launches the kernels."""

"""The codec in each of its forms: eager everywhere, compiled, native on CPU, Triton on CUDA."""

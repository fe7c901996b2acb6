"""The kernels, in Triton's language. Importing a module of this folder imports Triton.

Written once for every compiler of it: loads and stores with masks, sums, exponentials, and matrix
products; grids of one dimension; nothing that only CUDA has. The modules of `_kernels.triton`
launch them.

[Note: offsets] What is added to a pointer is int64 throughout: a tensor may have more than 2 ** 31
elements, and so may what lies between two of its rows.

[Note: strides] A stride of 1 is compiled in, as Triton does it with every argument that is 1, and
the loads and stores along it are of up to 16 bytes each. Any other stride is right too, 0 among
them (a gradient that was broadcast), and slower.
"""

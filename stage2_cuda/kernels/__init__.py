"""The Triton kernels: a file has the kernels of one operation, forward and backward, and functions that launch them.

The caller of such a function allocates the outputs and passes them first. All arrays are contiguous. A kernel loads
elements of any float dtype, computes in float32, and rounds to the dtype of the output, unless its docstring says
otherwise. A program is one instance of a kernel, as in Triton's tutorials; a tile is the block of elements that a
program processes at a time. Some programs process several tiles.
"""

"""Triton kernels: the only modules of the package that import Triton."""

"""The Triton kernels in Triton's interpreter, on tensors of the processor."""

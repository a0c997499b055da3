"""Bodies for NVIDIA GPUs, in Triton; `device.usable` says whether they run here, `ops.dispatch.gpu` chooses them."""

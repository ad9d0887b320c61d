"""`Kernels` in Triton, for GPUs."""

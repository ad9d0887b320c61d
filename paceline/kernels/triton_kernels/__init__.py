"""The hot operations as Triton kernels, for GPUs."""

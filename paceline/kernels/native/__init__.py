"""Kernels in C++ for CPU. `NativeKernels` is all that others need."""

from paceline.kernels.native.kernels import NativeKernels as NativeKernels

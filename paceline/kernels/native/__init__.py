"""Kernels in C++ for CPUs. Other packages need only `NativeKernels`."""

from paceline.kernels.native.kernels import NativeKernels as NativeKernels

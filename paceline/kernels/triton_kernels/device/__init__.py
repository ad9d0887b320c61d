"""Code that runs on the GPU, apart from what launches it. Not typed: to Triton an annotation means something else."""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run on the CPU, in Triton's interpreter. Decided by TRITON_INTERPRET when they are imported."""

"""Code that runs on the GPU, apart from its launches. Not typed, because Triton gives annotations another meaning."""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU. TRITON_INTERPRET decides it on import."""

"""The properties of a worker that affect the last bits of its results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numerics:
    """The arithmetic of a worker. Two workers of one model with equal numerics give the same tokens for a request.

    The exceptions are kernels that round differently for different batches, and probabilistic drafts.
    """

    instruction_set: str
    """Instruction set of the native kernels, such as "avx2". For other kernels, their name and the processor or GPU
    that they run on, such as "reference avx2" or "triton sm_90".
    """
    dtype: str
    """Type of weights and activations, such as "bfloat16"; with a code of keys and values, "bfloat16 kv int8"."""
    quantization: str
    """"int8" if weights were rounded when they were loaded, "gguf" or "checkpoint" if quantized weights of a GGUF file
    or of the checkpoint are multiplied in integers, or if activations are rounded to bytes as the checkpoint's format
    says, else "none". If quantized weights are multiplied as floats, the results have the same bits as with "none".
    """
    implementation: str = "native"
    """The code that computes the model: "native" for ours, or "transformers" and its version."""

    def __str__(self) -> str:
        rounding = "" if self.quantization == "none" else f" {self.quantization}"
        code = "" if self.implementation == "native" else f" {self.implementation}"
        return f"{self.instruction_set} {self.dtype}{rounding}{code}"


def may_differ(before: Numerics | None, now: Numerics | None) -> bool:
    """Return whether tokens may change if a request continues under numerics `now` after `before`. None means unknown.

    Returns False if the numerics before are unknown, because nothing can be compared.
    """
    return before is not None and now != before

"""GPU memory that several processes use: one process allocates it, the others map it (CUDA IPC through torch)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.proto import kvtransfer_pb2 as pb


def device_name(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in every process however it numbers the GPUs; "cpu" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def export(pool: Tensor) -> pb.CudaMemory:
    """Return the handle that `map_exported` needs in another process. The pool must not be freed while this process
    lives.
    """
    shared = pool.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    _, handle, size, offset, ref_counter, ref_counter_offset, event, waits = shared
    return pb.CudaMemory(
        handle=handle,
        size=size,
        offset=offset,
        ref_counter=ref_counter,
        ref_counter_offset=ref_counter_offset,
        event=event,
        waits_for_event=waits,
    )


def map_exported(memory: pb.CudaMemory, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Map memory that another process exported on this device, as a flat tensor. Raises RuntimeError if this fails."""
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        memory.handle,
        memory.size,
        memory.offset,
        memory.ref_counter,
        memory.ref_counter_offset,
        memory.event,
        memory.waits_for_event,
    )
    return torch.empty(0, dtype=dtype, device=device).set_(storage)

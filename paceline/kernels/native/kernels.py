"""`Kernels` in C++ for CPUs: matrix products at memory speed, and results of a row that never depend on its batch."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.experts import Routing
from paceline.core.turns import Turns
from paceline.kernels.composed import Composed
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import (
    AttentionBatch,
    Draw,
    Forward,
    GroupTables,
    LayerCache,
    Logits,
    NormKind,
    PackedWeight,
    RecurrentState,
)
from paceline.kernels.native.experts import ACTIVATIONS, MOST_GROUPS, changes_of, choosing_format, index_experts
from paceline.kernels.native.library import (
    COMPRESSED,
    ERRORS,
    POINTERS,
    TYPES,
    Cache,
    Choice,
    Kind,
    Op,
    Step,
    instruction_sets,
    library_digest,
    load_library,
    make_step,
)
from paceline.kernels.native.memory import WeightMemory
from paceline.kernels.native.replay import Operands, Recorder, Replay
from paceline.kernels.native.tiles import pack_tiles, tile_format, tiles_bytes
from paceline.kernels.quantized import QuantizedMatrix

COMPRESSING = ("avx512-bf16",)
"""Instruction sets whose kernels read bf16 in 12 bits. AMX kernels would first have to write it out in 16 bits."""
INTEGER_PRODUCTS = ("avx512-bf16", "avx512", "avx2")
"""Instruction sets that multiply bf16 with quantized weights in integers, without rounding the weights to bf16."""
_MOST_TAPS = 16
"""`kMostTaps` of src/recurrent.h."""


class NativeKernels(Composed):
    """`Kernels` in bf16 and fp32 on a CPU, with a team of threads of its own.

    Each row of a result is computed in an order that depends only on the shapes of the weights. So it has the same bits
    in any batch, in any chunk of a prompt, and on any number of threads. Instruction sets may differ from each other.

    Args:
        threads: number of threads that compute together, including the calling one. Fewer if the system gives no more.
        instruction_set: the name of an instruction set, or "auto" for the best that runs here.
        compress: whether to keep bf16 matrices in 12 bits, if the kernels of the instruction set can read them.

    Raises:
        ConfigError: the library is not compiled, or the instruction set does not run here.
    """

    name = "native"
    compiles_states = True

    def __init__(self, threads: int, instruction_set: str = "auto", compress: bool = True) -> None:
        known = instruction_sets()
        self.instruction_set = known[0] if instruction_set == "auto" else instruction_set
        if self.instruction_set not in known:
            choices = ", ".join(["auto", *known])
            raise ConfigError(f"the instruction set {instruction_set!r} does not run here; choose one of: {choices}")
        self._library = load_library()
        self._memory = WeightMemory(self._library)
        self.compresses = compress and self.instruction_set in COMPRESSING
        self.packing = f"native-{library_digest()}" + ("-compressed" if self.compresses else "")
        self._team = self._library.paceline_team_start(threads, self.instruction_set.encode())
        if self._team is None:
            raise MemoryError("there is no memory for a team of threads")
        self.recorder: Recorder | None = None
        self.one_at_a_time = threading.Lock()
        # Not when the interpreter exits, because a thread of the engine may still be computing then.
        weakref.finalize(self, _stop_team, self._library, self._team, os.getpid()).atexit = False

    def take_turns(self, turns: Turns) -> None:
        self._turns = turns  # keeps the page alive
        page = ctypes.addressof(ctypes.c_char.from_buffer(turns.page))
        self._library.paceline_team_take_turns(self._team, page, turns.slot)

    @property
    def chooser(self) -> NativeChooser:
        return NativeChooser(self)

    def compile(self, forward: Forward) -> Forward:
        return Replay(forward, self)

    def pack(self, weight: Tensor | QuantizedMatrix) -> PackedWeight:
        *_, out, size_in = weight.shape
        if isinstance(weight, QuantizedMatrix):
            tiles, how = self._memory.take(tiles_bytes(weight)), tile_format(weight, self.instruction_set)
            pack_tiles(weight, how, tiles)
            return PackedWeight(tiles, out, size_in, weight.dtype, how)
        heads = len(weight) if weight.dim() == 3 else None
        if weight.is_meta:
            return PackedWeight(weight, out, size_in, weight.dtype, heads=heads)
        _check(weight)
        kind, weight = TYPES[weight.dtype], weight.contiguous()
        if heads is None and self.compresses and weight.dtype == torch.bfloat16:
            size = self._library.paceline_compressed_bytes(weight.data_ptr(), out, size_in)
            if size:
                data = self._memory.take(size)
                self._library.paceline_compress(weight.data_ptr(), out, size_in, data.data_ptr())
                return PackedWeight(data, out, size_in, weight.dtype, COMPRESSED)
        packed_bytes = self._library.paceline_packed_bytes(kind, out, size_in)
        data = self._memory.take((heads or 1) * packed_bytes).view(weight.dtype)
        for index, matrix in enumerate(weight.view(-1, out, size_in)):
            self._library.paceline_pack(kind, matrix.data_ptr(), out, size_in, data.data_ptr() + index * packed_bytes)
        return PackedWeight(data, out, size_in, weight.dtype, heads=heads)

    def fits(self, weight: PackedWeight) -> bool:
        data, out, size_in = weight.data, weight.size_out, weight.size_in
        if weight.format == COMPRESSED:
            return bool(self._library.paceline_is_compressed(data.data_ptr(), data.nbytes, out, size_in))
        whole: int = self._library.paceline_packed_bytes(TYPES[weight.dtype], out, size_in)
        return weight.format is None and data.nbytes == whole * (weight.heads or 1)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            _need("the bias", bias, x.dtype, weight.size_out)
        return self._multiply(Kind.LINEAR, x, weight, bias, x.dtype)

    def logits(self, x: Tensor, weight: PackedWeight) -> Logits:
        best = x.new_empty(len(x), dtype=torch.int64)
        return Logits(self._multiply(Kind.LOGITS, x, weight, best, torch.float32), best)

    def router_logits(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            _need("the bias", bias, x.dtype, weight.size_out)
        return self._multiply(Kind.ROUTER_LOGITS, x, weight, bias, torch.float32)

    def choose_experts(
        self, logits: Tensor, routing: Routing, correction: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = logits.shape
        _need("the logits", logits, torch.float32, tokens, experts)
        if routing.groups > MOST_GROUPS:
            raise ConfigError(f"the native kernels take {MOST_GROUPS} groups of experts; choose --kernels reference")
        changes = None if correction is None and scales is None else changes_of(correction, scales)
        weights = logits.new_empty(tokens, routing.top_k)
        ids = logits.new_empty(tokens, routing.top_k, dtype=torch.int64)
        op = Op(Kind.CHOOSE_EXPERTS, rows=tokens, n0=experts, n1=routing.top_k, n2=routing.groups, f0=routing.factor)
        op.cache.slots, op.format = routing.top_groups, choosing_format(routing)
        self._run(op, weights, (logits.contiguous(), changes, ids))
        return ids, weights

    def index_experts(self, experts: ExpertWeights) -> ExpertWeights:
        return index_experts(experts)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        (tokens, hidden), top_k, gate = x.shape, ids.shape[1], experts.gate[0]
        if experts.table is None or (gate.size_in, gate.dtype) != (hidden, x.dtype):
            raise ValueError(f"x is {list(x.shape)} {x.dtype}; the experts take [tokens, {gate.size_in}] {gate.dtype}")
        _need("the experts of tokens", ids, torch.int64, tokens, top_k)
        _need("their weights", weights, torch.float32, tokens, top_k)
        x = _with_dense_rows(x)
        out = x.new_empty(tokens, hidden)
        op = Op(Kind.EXPERTS, rows=tokens, n0=hidden, n1=gate.size_out, n2=x.stride(0))
        op.format = ACTIVATIONS.index(experts.activation)
        op.cache = Cache(experts.table.data_ptr(), None, len(experts.gate), top_k)
        self._run(op, out, (x, ids.contiguous(), weights.contiguous()))
        return out

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        tokens, size = x.shape
        _need("the second operand", y, x.dtype, tokens, size)
        _need("the gate", gate, x.dtype, tokens, 1)
        out = x.new_empty(tokens, size)
        operands = (x.contiguous(), y.contiguous(), gate.contiguous())
        self._run(Op(Kind.ADD_GATED, rows=tokens, n0=size), out, operands)
        return out

    def _multiply(
        self, kind: Kind, x: Tensor, weight: PackedWeight, other: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return a product [tokens, out] in `dtype`. `other` is a bias, or the best tokens of LOGITS."""
        if x.dtype != weight.dtype or x.shape[1:] != (weight.size_in,):
            raise ValueError(
                f"x is {list(x.shape)} {x.dtype}; the weight takes [tokens, {weight.size_in}] {weight.dtype}"
            )
        x = _with_dense_rows(x)
        out = x.new_empty(len(x), weight.size_out, dtype=dtype)
        op = Op(kind, rows=len(x), n0=weight.size_in, n1=weight.size_out, n2=x.stride(0))
        op.format = weight.format or 0
        self._run(op, out, (x, weight.data, other), dtype=x.dtype)
        return out

    def embed(self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        token_ids = _ints("token ids", token_ids)
        out = token_ids.new_empty(len(token_ids), weight.size_in, dtype=weight.dtype)
        factor = float(torch.tensor(scale, dtype=out.dtype))
        op = Op(Kind.EMBED, rows=len(token_ids), n0=weight.size_in, n1=weight.size_out, f0=factor)
        op.format = weight.format or 0
        self._run(op, out, (token_ids, weight.data))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED) -> Tensor:
        size = x.shape[-1]
        _need("the norm's weight", weight, x.dtype, size)
        rows = _with_dense_rows(x.reshape(-1, size))
        out = rows.new_empty(rows.shape)
        op = Op(Kind.RMS_NORM, rows=len(rows), n0=size, n1=rows.stride(0), n2=kind, f0=eps)
        self._run(op, out, (rows, weight))
        return out.view(x.shape)

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        scale: float = 1.0,
        growth: float = 0.0,
        growth_tokens: int = 1,
    ) -> tuple[Tensor, Tensor]:
        tokens, half = len(positions), len(frequencies)
        _need("the frequencies", frequencies, torch.float32, half)
        cos, sin = (positions.new_empty(tokens, 2 * half, dtype=torch.float32) for _ in range(2))
        op = Op(Kind.ROTATION, rows=tokens, n0=half, n1=growth_tokens, f0=scale, f1=growth)
        self._run(op, cos, (_ints("positions", positions), frequencies, sin))
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, heads, head_dim = x.shape
        for angles in (cos, sin):
            _need("cos or sin", angles, torch.float32, tokens, head_dim)
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            x = x.contiguous()
        out = x.new_empty(x.shape)
        op = Op(Kind.ROTATE, rows=tokens, n0=heads, n1=head_dim, n2=x.stride(0))
        self._run(op, out, (x, cos.contiguous(), sin.contiguous()))
        return out

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        _need("values", values, keys.dtype, *keys.shape)
        op = Op(Kind.STORE_KV, rows=len(keys), cache=_cache(cache, keys, group))
        keys = keys.contiguous()
        self._run(op, keys, (keys, values.contiguous()), AttentionBatch((0,), (), (group,)), group)

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: GroupTables,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        queries = queries.contiguous()
        out = queries.new_empty(queries.shape)
        tokens, heads, _ = queries.shape
        if sinks is not None:
            _need("the sinks", sinks, torch.float32, heads)
        op = Op(Kind.ATTENTION, rows=tokens, n0=heads, f0=scale, f1=softcap, cache=_cache(cache, queries, group))
        self._run(op, out, (queries, sinks), batch, group)
        return out

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._elementwise(Kind.SILU_AND_MUL, gate, up)

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._elementwise(Kind.GELU_TANH_AND_MUL, gate, up)

    def sigmoid_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._elementwise(Kind.SIGMOID_AND_MUL, gate, up)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._elementwise(Kind.ADD, x, y)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        self._run(Op(Kind.SCALE, rows=x.shape[0], n0=x.shape[1:].numel(), f0=factor), out, (x,))
        return out

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        (tokens, channels), taps = x.shape, len(weight)
        if taps > _MOST_TAPS:
            raise ConfigError(f"the native kernels convolve up to {_MOST_TAPS} inputs; choose --kernels reference")
        _need("the weight", weight, x.dtype, taps, channels)
        if bias is not None:
            _need("the bias", bias, x.dtype, channels)
        x, out, rows = x.contiguous(), x.new_empty(x.shape), max(taps - 1, state.shape[1])
        op = Op(Kind.CAUSAL_CONV, rows=tokens, n0=channels, n1=taps, n2=rows, cache=_state(state, rows, channels))
        self._run(op, out, (x, weight, bias), batch, group)
        return out

    def selective_scan(
        self,
        x: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        tokens, (_, heads, head_dim, state_size) = len(x), state.state.shape
        _need("the inputs", x, x.dtype, tokens, heads * head_dim + 2 * state_size)
        _need("the time steps", time_steps, x.dtype, tokens, heads)
        _need("the rates", rates, torch.float32, 3, heads)
        out = x.new_empty(tokens, heads * head_dim)
        cache = _recurrent_state(state, x.shape[1] + heads)
        op = Op(Kind.SELECTIVE_SCAN, rows=tokens, n0=state_size, n1=_room(state), cache=cache)
        self._run(op, out, (x.contiguous(), time_steps.contiguous(), rates), batch, group)
        return out

    def linear_heads(self, x: Tensor, weight: PackedWeight) -> Tensor:
        tokens, heads, size_in = x.shape
        if weight.heads != heads or size_in != weight.size_in or x.dtype != weight.dtype:
            wanted = f"[tokens, {weight.heads}, {weight.size_in}] {weight.dtype}"
            raise ValueError(f"x is {list(x.shape)} {x.dtype}; the weight takes {wanted}")
        if x.stride(2) != 1 or x.stride(0) != heads * x.stride(1):
            x = x.contiguous()
        out = x.new_empty(tokens, heads, weight.size_out)
        cache = Cache(kv_heads=heads)
        op = Op(Kind.LINEAR_HEADS, rows=tokens, n0=size_in, n1=weight.size_out, n2=x.stride(1), cache=cache)
        self._run(op, out, (x, weight.data))
        return out

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        _need("the second operand", y, x.dtype, *x.shape[:2], y.shape[2])
        x, y = x.contiguous(), y.contiguous()
        out = x.new_empty(*x.shape[:2], x.shape[2] + y.shape[2])
        self._run(Op(Kind.CONCAT, rows=x.shape[0] * x.shape[1], n0=x.shape[2], n1=y.shape[2]), out, (x, y))
        return out

    def gated_delta_rule(
        self,
        x: Tensor,
        gates: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        tokens, (_, heads, key_dim, value_dim) = len(x), state.state.shape
        key_heads = (x.shape[1] - heads * value_dim) // (2 * key_dim)
        _need("the inputs", x, x.dtype, tokens, 2 * key_heads * key_dim + heads * value_dim)
        _need("the gates", gates, x.dtype, tokens, heads)
        _need("the time steps", time_steps, x.dtype, tokens, heads)
        _need("the rates", rates, torch.float32, 2, heads)
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"{heads} value heads cannot share {key_heads} key heads evenly")
        out = x.new_empty(tokens, heads * value_dim)
        cache = _recurrent_state(state, x.shape[1] + 2 * heads)
        op = Op(Kind.GATED_DELTA_RULE, rows=tokens, n0=value_dim, n1=key_heads, n2=_room(state), cache=cache)
        self._run(op, out, (x.contiguous(), gates.contiguous(), time_steps.contiguous(), rates), batch, group)
        return out

    def _elementwise(self, kind: Kind, a: Tensor, b: Tensor) -> Tensor:
        _need("the second operand", b, a.dtype, *a.shape)
        a, size = a.contiguous(), a.shape[1:].numel()
        b = _with_dense_rows(b) if b.dim() == 2 else b.contiguous()
        out = a.new_empty(a.shape)
        self._run(Op(kind, rows=a.shape[0], n0=size, n1=b.stride(0)), out, (a, b))
        return out

    def _run(
        self,
        op: Op,
        out: Tensor,
        inputs: Sequence[Tensor | None],
        batch: AttentionBatch | None = None,
        group: GroupTables | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compute an operation now, or record it. Operands are checked on recording, not on replay.

        Args:
            dtype: the dtype in which the operation computes; by default the result's.
        """
        _check(out)
        operands = (out, *inputs, *(None,) * (len(POINTERS) - 1 - len(inputs)))
        op.type = TYPES[dtype or out.dtype]
        if self.recorder is not None and out.is_meta:
            self.recorder.add(op, operands, group)
        else:
            self._run_now(op, operands, batch, group)

    def _run_now(self, op: Op, operands: Operands, batch: AttentionBatch | None, group: GroupTables | None) -> None:
        for name, tensor in zip(POINTERS, operands):
            setattr(op, name, None if tensor is None else tensor.data_ptr())
        step = Step(tokens=1)
        if batch is not None and group is not None:
            step = make_step(op.rows, batch, (group,))
            op.rows = 1
        self.execute(op, 1, step)

    def execute(self, ops: ctypes.Array[Op] | Op, count: int, step: Step) -> None:
        """Run operations in order. Raises IndexError if a token id or slot does not exist, and MemoryError."""
        error = self._library.paceline_run(self._team, ctypes.byref(ops), count, ctypes.byref(step))
        if error:
            kind, message = ERRORS[error]
            raise kind(message)


class NativeChooser:
    """The `TokenChooser` of `NativeKernels`."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def choose(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tensor:
        _need("the logits", logits, torch.float32, len(logits), logits.shape[1])
        if not all(0 <= row < len(logits) for row in rows):
            raise IndexError(f"rows {list(rows)} were asked for; there are {len(logits)} rows of logits")
        logits = _with_dense_rows(logits)
        choices = (Choice * len(rows))(
            *(
                Choice(row, draw.temperature, draw.top_k, draw.min_p, draw.top_p, draw.seed, draw.position)
                for row, draw in zip(rows, draws, strict=True)
            )
        )
        tokens = logits.new_empty(len(rows), dtype=torch.int64)
        op = Op(Kind.CHOOSE, TYPES[logits.dtype], len(rows), n0=logits.shape[1], n1=logits.stride(0))
        op.out, op.a, op.b = tokens.data_ptr(), logits.data_ptr(), ctypes.addressof(choices)
        self._kernels.execute(op, 1, Step(tokens=1))
        return tokens

    def accept(self, tokens: Tensor, drafts: Tensor, first_rows: Sequence[int]) -> Tensor:
        chosen, proposed = tokens.tolist(), drafts.tolist()
        accepted = []
        for first, end in pairwise(first_rows):
            last = first
            while last + 1 < end and chosen[last] == proposed[last + 1]:
                last += 1
            accepted.append(chosen[first : min(last + 1, end)])
        width = max((len(own) for own in accepted), default=0) or 1
        return torch.tensor([own + [-1] * (width - len(own)) for own in accepted]).view(len(accepted), width)


def _stop_team(library: ctypes.CDLL, team: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has none of the threads that this call would wait for
        library.paceline_team_stop(team)


def _check(tensor: Tensor) -> None:
    if tensor.dtype not in TYPES or not (tensor.is_cpu or tensor.is_meta):
        raise ConfigError(
            f"the native kernels compute bfloat16 and float32 on cpu, not {tensor.dtype} on {tensor.device}; "
            "choose --kernels reference"
        )


def _with_dense_rows(x: Tensor) -> Tensor:
    """Return x [rows, size] with dense rows. The rows may be apart from each other."""
    return x if x.stride(1) == 1 else x.contiguous()


def _need(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)} {dtype}, not {list(tensor.shape)} {tensor.dtype}")


def _ints(name: str, tensor: Tensor) -> Tensor:
    """Return int64 [tokens] as a contiguous tensor."""
    _need(name, tensor, torch.int64, len(tensor))
    return tensor.contiguous()


def _cache(cache: LayerCache, x: Tensor, group: GroupTables) -> Cache:
    """Return the C structure of the cache to which x [tokens, heads, head_dim] is written, or which it attends to."""
    slots, kv_heads, _, _ = cache.keys.shape
    head_dim = x.shape[2]
    for plane in (cache.keys, cache.values):
        _need("the cache", plane, x.dtype, slots, kv_heads, group.block_tokens, head_dim)
    strides = cache.keys.stride()
    if strides[3] != 1 or cache.values.stride() != strides:
        raise ValueError(f"the cache: keys have strides {strides}, values {cache.values.stride()}; the last must be 1")
    return Cache(cache.keys.data_ptr(), cache.values.data_ptr(), slots, kv_heads, head_dim, *strides[:3])


def _state(state: Tensor, *shape: int) -> Cache:
    """Return the C structure of a part of a layer's state."""
    slots = len(state)
    _need("the state", state, torch.float32, slots, *shape)
    if not state[0].is_contiguous():
        raise ValueError(f"the state: a slot's part must be dense; its strides are {state.stride()}")
    return Cache(state.data_ptr(), None, slots, slot_stride=state.stride(0))


def _recurrent_state(state: RecurrentState, inputs: int) -> Cache:
    """Return the C structure of a recurrence's state [slots, heads, ...]. A token has `inputs` pending inputs."""
    _, heads, head_dim, *_ = state.state.shape
    cache = _state(state.state, *state.state.shape[1:])
    pending = _state(state.pending, 1 + _room(state), inputs)
    if (pending.slots, pending.slot_stride) != (cache.slots, cache.slot_stride):
        raise ValueError("the pending inputs must be in the same blocks as the state")
    cache.values, cache.kv_heads, cache.head_dim = pending.keys, heads, head_dim
    return cache


def _room(state: RecurrentState) -> int:
    """Return the number of tokens for whose pending inputs a block has room."""
    return max(0, state.pending.shape[1] - 1)

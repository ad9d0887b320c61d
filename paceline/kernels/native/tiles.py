"""Quantized matrices in the layout that the native kernels read. See `Format` in src/program.h."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.quantized import BLOCK, QuantizedMatrix

LANES = 16
"""Number of outputs (rows of the matrix) in one tile."""
_ROWS = 1024 * LANES
"""Number of outputs that are packed at a time. The matrix of a vocabulary has too many outputs to be packed at once."""
EIGHT_BITS, WIDE_SCALES, OFFSETS, TWO_SCALES, BLOCKS, ROWS, WIDE_WORDS = 1, 2, 4, 8, 16, 32, 128
HALF, UNROUNDED = 256, 512
_ALL = EIGHT_BITS | WIDE_SCALES | OFFSETS | TWO_SCALES | BLOCKS | ROWS | WIDE_WORDS | HALF | UNROUNDED


def tile_format(matrix: QuantizedMatrix, instruction_set: str) -> int:
    """Return the `Format` of this matrix's tiles, for the kernels of an instruction set."""
    blocks = -(-matrix.shape[1] // BLOCK)
    one_scale, is_narrow = matrix.scales.shape[1] == blocks, matrix.bits == 4
    rows = instruction_set == "amx" and matrix.dtype == torch.bfloat16 and is_narrow and one_scale
    return (
        BLOCKS
        + ROWS * rows
        + WIDE_WORDS * (instruction_set == "amx" and is_narrow and not rows)
        + EIGHT_BITS * (matrix.bits == 8)
        + WIDE_SCALES * (matrix.scales.dtype == torch.float32)
        + OFFSETS * (matrix.offsets is not None)
        + TWO_SCALES * (not one_scale)
        + HALF * (matrix.rounding == torch.float16)
        + UNROUNDED * (matrix.rounding == torch.float32)
    )


def tiles_bytes(tile_format: int, size_out: int, size_in: int) -> int:
    """Return the number of bytes that `pack_tiles` writes for a matrix [size_out, size_in]; 0 for an unknown format."""
    if not tile_format & BLOCKS or tile_format & ~_ALL:
        return 0
    groups, blocks = -(-size_out // LANES), -(-size_in // BLOCK)
    code_bytes = BLOCK if tile_format & EIGHT_BITS else BLOCK // 2
    scales = (2 if tile_format & TWO_SCALES else 1) + (1 if tile_format & OFFSETS else 0)
    return groups * LANES * blocks * (code_bytes + scales * (4 if tile_format & WIDE_SCALES else 2))


def pack_tiles(matrix: QuantizedMatrix, tile_format: int, to: Tensor) -> None:
    """Write the matrix to `to`, uint8, flat, in tiles of sixteen outputs and one block each."""
    done = 0
    for first in range(0, matrix.shape[0], _ROWS):
        tiles = _pack_rows(matrix[first : first + _ROWS], tile_format)
        to[done : done + len(tiles)] = tiles
        done += len(tiles)


def _pack_rows(matrix: QuantizedMatrix, tile_format: int) -> Tensor:
    size_out, size_in = matrix.shape
    padding = (0, -size_in % BLOCK, 0, -size_out % LANES)
    values = F.pad(matrix.values, padding)
    if matrix.bits == 4:
        nibbles = (values + (0 if matrix.offsets is not None else 8)).to(torch.uint8)
        pack = _nibble_rows if tile_format & ROWS else _wide_nibbles if tile_format & WIDE_WORDS else _nibbles
        codes = pack(nibbles)
    else:
        codes = _bytes(values)
    parts = [codes, _by_tile(matrix.scales, codes.shape[1])]
    if matrix.offsets is not None:
        parts.append(_by_tile(matrix.offsets, codes.shape[1]))
    tiles = torch.cat(parts, dim=2)
    paired = len(tiles) // 2 * 2
    pairs = tiles[:paired].view(-1, 2, *tiles.shape[1:]).transpose(1, 2)
    return torch.cat((pairs.flatten(), tiles[paired:].flatten()))


def _nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, uint8 [out, in], into bytes [out / 16, in / 32, 256]."""
    parts = codes.view(-1, LANES, codes.shape[1] // BLOCK, 4, 2, 2, 2)
    both = parts[..., 0, :] | parts[..., 1, :] << 4  # [tiles, outputs, blocks, 4 words, 2 bytes of a word, 2 of a pair]
    return both.permute(0, 2, 3, 1, 5, 4).reshape(len(both), -1, LANES * BLOCK // 2)


def _wide_nibbles(codes: Tensor) -> Tensor:
    """Pack as `_nibbles`, but in the order of the format `WIDE_WORDS`."""
    parts = codes.view(-1, 2, 8, codes.shape[1] // BLOCK, 4, 4, 2)
    both = parts[:, 0] | parts[:, 1] << 4  # [tiles, 8 outputs, blocks, 4 words, 4 pairs, 2 of a pair]
    return both.permute(0, 2, 3, 1, 5, 4).reshape(len(both), -1, LANES * BLOCK // 2)


def _nibble_rows(codes: Tensor) -> Tensor:
    """Pack as `_nibbles`, but in the order of the format `ROWS`."""
    parts = codes.view(-1, 4, 2, 2, codes.shape[1] // BLOCK, BLOCK)
    both = parts[:, :, :, 0] | parts[:, :, :, 1] << 4  # [tiles, 4 words, 2 bytes of a word, blocks, 32 values]
    return both.permute(0, 3, 1, 4, 2).reshape(len(both), -1, LANES * BLOCK // 2)


def _bytes(values: Tensor) -> Tensor:
    """Pack int8 [out, in] into bytes [out / 16, in / 32, 512]."""
    parts = values.view(torch.uint8).view(-1, LANES, values.shape[1] // BLOCK, BLOCK // 2, 2)
    return parts.permute(0, 2, 3, 1, 4).reshape(len(parts), -1, LANES * BLOCK)


def _by_tile(scales: Tensor, blocks: int) -> Tensor:
    """Pack scales or offsets [out, blocks * n] into bytes [out / 16, blocks, n * 16 * itemsize]."""
    padded = F.pad(scales, (0, 0, 0, -scales.shape[0] % LANES))
    parts = padded.view(-1, LANES, blocks, padded.shape[1] // blocks).permute(0, 2, 3, 1)
    return parts.reshape(len(parts), blocks, -1).contiguous().view(torch.uint8)

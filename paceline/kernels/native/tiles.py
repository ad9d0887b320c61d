"""Quantized matrices in the layout that the native kernels read. See `Format` in src/program.h."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.quantized import BLOCK, QuantizedMatrix, QuantizedRows

LANES = 16
"""Number of outputs (rows of the matrix) in one tile."""
_AT_A_TIME = 1 << 19
"""Number of weights that are packed at a time, so that what is between stays in the processor's cache."""
EIGHT_BITS, WIDE_SCALES, OFFSETS, TWO_SCALES, BLOCKS, ROWS, WIDE_WORDS = 1, 2, 4, 8, 16, 32, 128
HALF, UNROUNDED = 256, 512
TABLE, WHOLE_NUMBERS, HALVES, FLOATS = 1024, 2048, 4096, 8192
POWER_SCALES, FLOAT_SCALES = 16384, 32768
FIVE_BITS, SIX_BITS, BYTE_SCALES, SIX_BIT_SCALES = 65536, 131072, 262144, 524288
TWO_BITS, THREE_BITS, FOUR_BIT_SCALES = 1 << 22, 1 << 23, 1 << 24
_SPAN_SHIFT = 20
"""The exponent of 2 of the number of blocks in a tile is in two bits from this one on."""
_ALL = (
    (EIGHT_BITS | WIDE_SCALES | OFFSETS | TWO_SCALES | BLOCKS | ROWS | WIDE_WORDS | HALF | UNROUNDED)
    | (TABLE | WHOLE_NUMBERS | HALVES | FLOATS | POWER_SCALES | FLOAT_SCALES)
    | (FIVE_BITS | SIX_BITS | BYTE_SCALES | SIX_BIT_SCALES)
    | (TWO_BITS | THREE_BITS | FOUR_BIT_SCALES)
    | 3 << _SPAN_SHIFT
)
_BITS = {2: TWO_BITS, 3: THREE_BITS, 4: 0, 5: FIVE_BITS, 6: SIX_BITS, 8: EIGHT_BITS}
"""The part of a format that tells the bits of a code."""
BYTE_INPUT, FIXED_SCALE = 1 << 32, 1 << 33
"""Products in which x becomes signed bytes, too; not in `_ALL`, because there are no tiles of blocks."""
_BYTES_DEPTH = 64
"""Number of values along `in` to which rows of bytes are padded."""
_HEAD_BYTES = 192
"""Bytes of `Head` of src/layout.h."""


def tile_format(matrix: QuantizedMatrix, instruction_set: str) -> int:
    """Return the `Format` of this matrix's tiles, for the kernels of an instruction set."""
    if matrix.input_scale is not None:
        return BLOCKS + EIGHT_BITS + BYTE_INPUT + FIXED_SCALE * (matrix.input_scale != 0)
    is_narrow = matrix.bits == 4 and instruction_set == "amx"
    rows = is_narrow and matrix.dtype == torch.bfloat16
    return (
        BLOCKS
        + ROWS * rows
        + WIDE_WORDS * (is_narrow and not rows and matrix.table is None)
        + _BITS[matrix.bits]
        + FLOATS * (matrix.values.dtype == torch.float8_e4m3fn)
        + (0 if matrix.table is None else _table_format(matrix.table))
        + _scales_format(matrix)
        + OFFSETS * (matrix.offsets is not None)
        + TWO_SCALES * (matrix.group < BLOCK)
        + HALF * (matrix.rounding == torch.float16)
        + UNROUNDED * (matrix.rounding == torch.float32)
        + (_span_exponent(matrix) << _SPAN_SHIFT)
    )


def _scales_format(matrix: QuantizedMatrix) -> int:
    if matrix.outer is None:
        return _SCALES_OF[matrix.scales.dtype]
    if matrix.offsets is None:
        return BYTE_SCALES
    return SIX_BIT_SCALES if matrix.group >= BLOCK else FOUR_BIT_SCALES


def _span_exponent(matrix: QuantizedMatrix) -> int:
    """Return the exponent of 2 of the number of blocks of a tile."""
    return 3 if matrix.outer is not None else max(matrix.group // BLOCK, 1).bit_length() - 1


_SCALES_OF = {
    torch.float16: 0,
    torch.float32: WIDE_SCALES,
    torch.uint8: POWER_SCALES,
    torch.float8_e4m3fn: FLOAT_SCALES,
}
"""The part of a format that tells the dtype of scales."""


def _table_format(table: Tensor) -> int:
    """Return the part of a format that tells what numbers a table has: whole ones, or halves of whole ones."""
    for factor, kind in ((1, WHOLE_NUMBERS), (2, HALVES)):
        whole = table * factor
        if bool((whole == whole.round()).all()) and float(whole.abs().max()) <= 127:
            return TABLE + kind
    return TABLE


def must_unpack(tile_format: int) -> bool:
    """Return whether no instruction set multiplies tiles of this format in integers."""
    return bool(tile_format & FLOATS or (tile_format & TABLE and not tile_format & (WHOLE_NUMBERS | HALVES)))


def tiles_bytes(tile_format: int, size_out: int, size_in: int) -> int:
    """Return the number of bytes that `pack_tiles` writes for a matrix [size_out, size_in]; 0 for an unknown format."""
    if tile_format & ~FIXED_SCALE == BLOCKS + EIGHT_BITS + BYTE_INPUT:
        return _HEAD_BYTES + -(-size_out // LANES) * LANES * (-(-size_in // _BYTES_DEPTH) * _BYTES_DEPTH + 8)
    if not tile_format & BLOCKS or tile_format & ~_ALL:
        return 0
    span = _span(tile_format)
    groups, tiles = -(-size_out // LANES), -(-size_in // (BLOCK * span))
    code_bytes = BLOCK // 8 * _bits(tile_format)
    scales = 2 if tile_format & TWO_SCALES else 1
    narrow = tile_format & (POWER_SCALES | FLOAT_SCALES)
    of_scale = 1 if narrow else 4 if tile_format & WIDE_SCALES else 2
    of_scales = scales * of_scale * (2 if tile_format & OFFSETS else 1)
    if tile_format & BYTE_SCALES:
        of_scales = scales * span + 2
    elif tile_format & SIX_BIT_SCALES:
        of_scales = 3 * span // 2 + 4
    elif tile_format & FOUR_BIT_SCALES:
        of_scales = scales * span + 4
    return _head_bytes(tile_format) + groups * LANES * tiles * (span * code_bytes + of_scales)


def _bits(tile_format: int) -> int:
    """Return the bits of a code."""
    return next((bits for bits, kind in _BITS.items() if tile_format & kind), 4)


def _span(tile_format: int) -> int:
    """Return the number of blocks of a tile."""
    return 1 << (tile_format >> _SPAN_SHIFT & 3)


def _head_bytes(tile_format: int) -> int:
    return _HEAD_BYTES if tile_format & (TABLE | FLOAT_SCALES) else 0


def pack_tiles(matrix: QuantizedMatrix | QuantizedRows, tile_format: int, to: Tensor) -> None:
    """Write the matrix to `to`, uint8, flat, in tiles of sixteen outputs and one block each, or the blocks of one
    scale.
    """
    if tile_format & BYTE_INPUT:
        assert isinstance(matrix, QuantizedMatrix)  # no GGUF type has whole rows of bytes
        _pack_bytes(matrix, to)
        return
    size_out, size_in = matrix.shape
    done = _head_bytes(tile_format)
    rows = max(2 * LANES, _AT_A_TIME // size_in // (2 * LANES) * (2 * LANES))
    for first in range(0, size_out, rows):
        part = matrix[first : first + rows]
        if done and not first:
            to[:done] = _head(part, tile_format)
        size = tiles_bytes(tile_format, *part.shape) - _head_bytes(tile_format)
        _pack_rows(part, tile_format, to[done : done + size])
        done += size


def _pack_bytes(matrix: QuantizedMatrix, to: Tensor) -> None:
    """Write a matrix for products in which x becomes signed bytes, as in src/bytes.h."""
    assert matrix.input_scale is not None
    size_out, size_in = matrix.shape
    groups, count = -(-size_out // LANES), -(-size_in // _BYTES_DEPTH) * _BYTES_DEPTH
    bytes_end = _HEAD_BYTES + groups * LANES * count
    to[:_HEAD_BYTES] = _head(replace(matrix, factors=torch.tensor([matrix.input_scale, 1.0])), 0)
    values = F.pad(matrix.values, (0, count - size_in, 0, -size_out % LANES)).view(groups, LANES, -1, 4)
    to[_HEAD_BYTES:bytes_end] = values.transpose(1, 2).reshape(-1).view(torch.uint8)
    scales = F.pad(matrix.scales.float().flatten(), (0, -size_out % LANES)).view(groups, LANES)
    excess = (values.sum((2, 3), dtype=torch.int64) * 128).to(torch.int32)
    to[bytes_end:] = torch.cat((scales.view(torch.uint8), excess.view(torch.uint8)), 1).flatten()


def _head(matrix: QuantizedMatrix, tile_format: int) -> Tensor:
    """Return the `Head` of src/layout.h for a matrix: uint8 [_HEAD_BYTES]."""
    table = torch.zeros(LANES) if matrix.table is None else matrix.table
    factors = torch.ones(2) if matrix.factors is None else matrix.factors
    whole = table * (2 if tile_format & HALVES else 1 if tile_format & WHOLE_NUMBERS else 0)
    parts = (table, whole.to(torch.int16).repeat(2), whole.to(torch.int8).repeat(2), factors)
    head = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    return F.pad(head, (0, _HEAD_BYTES - len(head)))


def _pack_rows(matrix: QuantizedMatrix, tile_format: int, to: Tensor) -> None:
    """Write the tiles of some rows, whose number is even in sixteens unless they are the last ones."""
    codes = _pack_codes(matrix, tile_format)
    count = codes.shape[1] // _span(tile_format)
    parts = [codes.view(len(codes), count, -1), *_scale_parts(matrix, tile_format, count)]
    tiles = to.view(len(codes), count, -1)
    paired = len(tiles) // 2 * 2
    pairs, start = tiles[:paired].view(-1, count, 2, tiles.shape[2]).transpose(1, 2), 0
    for part in parts:
        end = start + part.shape[2]
        pairs[..., start:end] = part[:paired].view(-1, 2, *part.shape[1:])
        tiles[paired:, :, start:end] = part[paired:]
        start = end


def _pack_codes(matrix: QuantizedMatrix, tile_format: int) -> Tensor:
    """Return the codes of blocks: uint8 [out / 16, in / 32, bytes]."""
    size_out, size_in = matrix.shape
    codes = F.pad(matrix.values.view(torch.int8), (0, -size_in % (BLOCK * _span(tile_format)), 0, -size_out % LANES))
    if matrix.bits < 8 and matrix.offsets is None and matrix.table is None:
        codes = codes + (1 << matrix.bits - 1)
    if tile_format & (ROWS | WIDE_WORDS):
        return (_nibble_rows if tile_format & ROWS else _wide_nibbles)(codes.view(torch.uint8))
    pairs = codes.view(torch.int16).view(-1, LANES, codes.shape[1] // 2).transpose(1, 2).contiguous()
    if matrix.bits == 8:
        return pairs.view(torch.uint8).view(len(pairs), -1, LANES * BLOCK)
    low = 4 if matrix.bits >= 4 else 2
    planes = [_plane(pairs & 0x101 * ((1 << low) - 1), low)]
    if matrix.bits > low:
        more = matrix.bits - low
        planes.append(_plane(pairs >> low & 0x101 * ((1 << more) - 1), more))
    return torch.cat(planes, dim=2)


def _scale_parts(matrix: QuantizedMatrix, tile_format: int, count: int) -> list[Tensor]:
    """Return what follows the codes in `count` tiles of each sixteen outputs: bytes [out / 16, count, ...]."""
    if tile_format & SIX_BIT_SCALES:
        assert matrix.offsets is not None
        scales, offsets = matrix.scales.view(torch.uint8), matrix.offsets.view(torch.uint8)
        high = scales >> 4 | offsets >> 4 << 2
        numbers = [scales & 15 | (offsets & 15) << 4, high[:, ::2] | high[:, 1::2] << 4]
    elif tile_format & FOUR_BIT_SCALES:
        assert matrix.offsets is not None
        numbers = [(matrix.scales | matrix.offsets << 4).view(torch.uint8)]
    else:
        numbers = [matrix.scales] if matrix.offsets is None else [matrix.scales, matrix.offsets]
    outer = [each for each in (matrix.outer, matrix.outer_offsets) if each is not None]
    return [_by_tile(each, count) for each in (*numbers, *outer)]


def _plane(pairs: Tensor, bits: int) -> Tensor:
    """Pack codes of 1, 2 or 4 bits into bytes [out / 16, in / 32, 64 * bits].

    Args:
        pairs: int16 [out / 16, in / 2, 16], each two codes of a byte.
    """
    # [tiles, words, 2 bytes of a word, codes of a byte, outputs]
    parts = pairs.view(len(pairs), -1, 2, 8 // bits, LANES)
    both = parts[:, :, :, 0]
    for place in range(1, 8 // bits):
        both = both | parts[:, :, :, place] << place * bits
    # From the first bytes of two words, and their second bytes, to the two words.
    first, second = both[:, :, 0].int(), both[:, :, 1].int()
    words = first & 0xFF | (second & 0xFF) << 8 | (first & 0xFF00) << 8 | (second & 0xFF00) << 16
    return words.view(torch.uint8).view(len(words), -1, LANES * BLOCK // 8 * bits)


def _wide_nibbles(codes: Tensor) -> Tensor:
    """Pack as `_plane`, but in the order of the format `WIDE_WORDS`."""
    parts = codes.view(-1, 2, 8, codes.shape[1] // BLOCK, 4, 4, 2)
    both = parts[:, 0] | parts[:, 1] << 4  # [tiles, 8 outputs, blocks, 4 words, 4 pairs, 2 of a pair]
    return both.permute(0, 2, 3, 1, 5, 4).reshape(len(both), -1, LANES * BLOCK // 2)


def _nibble_rows(codes: Tensor) -> Tensor:
    """Pack as `_plane`, but in the order of the format `ROWS`."""
    parts = codes.view(-1, 4, 4, codes.shape[1])  # [tiles, 4 words, 4 outputs of a word, in]
    low, high = ((parts[:, :, place] | parts[:, :, place + 1] << 4).short() for place in (0, 2))
    words = (low | high << 8).view(-1, 4, codes.shape[1] // BLOCK, BLOCK).transpose(1, 2)
    return words.contiguous().view(torch.uint8).view(len(words), -1, LANES * BLOCK // 2)


def _by_tile(scales: Tensor, tiles: int) -> Tensor:
    """Pack scales or offsets [out, tiles * n] into bytes [out / 16, tiles, n * 16 * itemsize]."""
    bits = scales.view(torch.uint8) if scales.itemsize == 1 else scales
    padded = F.pad(bits, (0, 0, 0, -scales.shape[0] % LANES))
    parts = padded.view(-1, LANES, tiles, padded.shape[1] // tiles).permute(0, 2, 3, 1)
    return parts.reshape(len(parts), tiles, -1).contiguous().view(torch.uint8)

// The input from Python: a program of operations, and the step for which it runs. Mirrored by ../library.py.
#pragma once

#include <cstdint>

namespace paceline {

class Team;

// Weights [out, in] are packed as [ceil(out / 16)][in / 2][16][2] in bf16, with `in` padded with zeros to a multiple of
// 32, and as [ceil(out / 16)][in][16] in fp32. So every output has a lane of its own, which adds up along `in`.
constexpr int64_t kLanes = 16;
constexpr int64_t kDepth = 32;  // bf16 values along `in` that one matrix tile takes
constexpr int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Quantized weights [out, in] are packed as tiles of sixteen outputs (a group) and one block of 32 values. Two groups
// alternate: [pairs of groups][ceil(in / 32)][2] tiles; if one group remains, [ceil(in / 32)] tiles follow. A tile has
// codes, then scales, then offsets if there are any. Byte codes are [in / 2][out][2]. Nibbles are 16-bit words
// [in / 8][out][in % 2] with four nibbles each, lowest first: [in / 2 % 4]. Each output has one scale and offset, or two,
// for 16 values each.
enum Format : int64_t {
    kFormatWhole = 0,  // not quantized
    kFormatEightBits = 1,   // signed bytes; else nibbles, 0 to 15 with offsets, -8 to 7 without
    kFormatWideScales = 2,  // fp32, else fp16
    kFormatOffsets = 4,
    kFormatTwoScales = 8,
    kFormatBlocks = 16,  // set for all quantized matrices
    kFormatRows = 32,    // nibbles for AMX, looked up by output: 16-bit words [out / 4][in] of four outputs
    kFormatCompressed = 64,  // not quantized: see below
    kFormatWideWords = 128,  // nibbles for AMX in fp32: 32-bit words [in / 8][out % 8][in % 2] of [in / 2 % 4][out / 8]
    // Weights are rounded to bf16 unless one of these is set.
    kFormatHalf = 256,  // rounded to fp16
    kFormatUnrounded = 512,
    kFormatTable = 1024,  // nibbles are places in the table of the head
    kFormatWholeNumbers = 2048,  // numbers of the table are whole
    kFormatHalves = 4096,        // or halves of whole numbers
    kFormatFloats = 8192,        // bytes are floats (E4M3), none of them NaN
    kFormatPowerScales = 16384,  // scales are bytes: exponents of 2, plus 127 (E8M0)
    kFormatFloatScales = 32768,  // scales are bytes: floats (E4M3), with factors in the head
    // Nibbles are the low bits of codes, -2^(bits - 1) to 2^(bits - 1) - 1 without offsets. After the nibbles of a block come
    // 16-bit words [out][in % 2] of its other bits, lowest first: one of [in / 2 % 16], or twice two of [in / 2 % 8].
    kFormatFiveBits = 65536,
    kFormatSixBits = 131072,
    // Or a block has no nibbles, but such words of the two lowest bits, and then, for three bits, of the third one.
    kFormatTwoBits = 1 << 22,
    kFormatThreeBits = 1 << 23,
    // The eight blocks of a tile have scales of their own, times an fp16 number of each output. Scales are signed bytes
    // [block][1 or 2][out], then the numbers [out].
    kFormatByteScales = 262144,
    // Or they and the offsets have 6 bits: bytes [block][out] with the low nibbles of a scale and an offset, then bytes
    // [block / 2][out] with two bits of a scale and two of an offset for each of two blocks, then the numbers of scales
    // [out] and of offsets [out].
    kFormatSixBitScales = 524288,
    // Or they and the offsets have 4 bits: bytes [block][2][out] with a scale in the low nibble and an offset in the other
    // one, then the numbers of scales [out] and of offsets [out].
    kFormatFourBitScales = 1 << 24,
    // Signed bytes, by which x is multiplied as signed bytes; see bytes.h. The head's factor is the scale of x, or 0 if each
    // token has its own.
    kFormatByteInput = int64_t{1} << 32,
    kFormatFixedScale = int64_t{1} << 33,  // the factor is not 0
};
// The exponent of 2 of the number of blocks of a tile is in two bits from this one on. Blocks of a tile have the same
// scales. Their codes come one after another, then the scales; the last tile along `in` may have unused blocks.
constexpr int kFormatSpanShift = 20;
constexpr int64_t kFormatsWithHead = kFormatTable | kFormatFloatScales;
// Returns whether products in integers are not possible for these weights.
constexpr bool must_unpack(int64_t format) {
    return format & kFormatFloats || (format & kFormatTable && !(format & (kFormatWholeNumbers | kFormatHalves)));
}

// What precedes the tiles of a matrix of kFormatsWithHead.
struct Head {
    float numbers[kLanes];  // the table
    int16_t whole[2 * kLanes];  // the same numbers twice, doubled if they are halves
    int8_t bytes[2 * kLanes];
    float factor, divisor;  // a scale is multiplied by the first one, then divided by the second one
    int32_t unused[6];
};

// Compressed weights [out, in] are bf16 in 12 bits, without loss: a byte of sign and mantissa, and a 4-bit code for the
// exponent, if it is one of the matrix's sixteen most frequent. They are parts [pairs of groups][ceil(in / 32)][4][2];
// if one group of sixteen outputs remains, its [ceil(in / 32)][4] parts follow. A part has sixteen outputs and 8 values
// along `in`, which are four rows of packed weights: 64 bytes of codes, with the first two rows in the lower nibbles,
// then 64 bytes of signs and mantissas for the first two rows and 64 for the other two. Two rows alternate every eight
// bytes. After all parts come the table of exponents, the number of earlier exceptions for every 32 outputs, and the
// exceptions in the order of their tiles.
constexpr int64_t kPartBytes = 192, kTileParts = kDepth / 8, kTileWeights = kLanes * kDepth;
struct ExponentTable {
    uint8_t high[16], low[16];  // an exponent's first seven bits and its last bit, in their places in bf16's bytes
};
// A weight whose exponent has no code. The last one of a matrix is a sentinel with the largest `tile`.
struct Exception {
    uint32_t tile;  // number of the tile, in the order of the parts
    uint16_t place, weight;  // `place` is among the tile's packed weights
};
struct CompressedLayout {
    int64_t table, starts, exceptions;  // offsets in bytes

    CompressedLayout(int64_t out, int64_t in)
        : table(round_up(out, kLanes) / kLanes * (round_up(in, kDepth) / kDepth) * kTileParts * kPartBytes),
          starts(table + int64_t{sizeof(ExponentTable)}),
          exceptions(starts + round_up(out, 2 * kLanes) / (2 * kLanes) * int64_t{sizeof(uint32_t)}) {}
    int64_t bytes(int64_t count) const { return exceptions + (count + 1) * int64_t{sizeof(Exception)}; }
};

enum Kind : int32_t {
    kLinear,      // out[rows, n1] = a[rows, n0] * b (packed) + c; n2: row stride of a; d: fp32 [4], least and greatest
                  // input and output, if the weights are not quantized, or null
    kEmbed,       // out[tokens, n0] = rows of b (packed, n1 rows) * f0; a: int64 ids
    kRmsNorm,     // out[rows, n0]; a: x with row stride n1; b: weight; n2: `NormKind`; f0: eps
    kRotation,    // out: fp32 cos [tokens, 2 * n0], c: sin; a: int64 positions; b: fp32 frequencies [n0]; f0: factor, f1:
                  // its growth, n1: tokens for each step of the growth
    kRotate,      // out[tokens, n0 heads, n1 dims]; a: x with token stride n2; b: cos, c: sin, fp32 [tokens, n1]
    kStoreKV,     // a: keys, b: values [tokens, kv_heads, head_dim] into the cache; format: `CacheFormat`
    kAttention,   // out[tokens, heads, head_dim]; a: queries; b: fp32 sinks [heads], or null; f0: scale; f1: softcap;
                  // n1: whether queries see keys up to `last_keys`, unless that is null; n2: but no key after their
                  // window; format: `CacheFormat`
    kSiluAndMul,  // out[rows, n0] = silu(a) * b; b has row stride n1
    kGeluTanhAndMul,
    kAdd,  // likewise
    kLinearSiluAndMul,  // out[rows, n1] = silu(a * b) * (a * c), as kLinear
    kLinearGeluTanhAndMul,
    kScale,          // out[rows, n0] = a * f0
    // out[tokens, n0 channels]; a: x; b: weight [n1 taps, channels]; c: bias, or null; n2: rows of the state
    kCausalConv,
    // out[tokens, heads * head_dim]; a: x; b: time steps; c: rates, fp32 [3, heads]; n0: state size; n1: the number of
    // tokens for whose pending inputs a block has room
    kSelectiveScan,
    kLogits,  // out: fp32 [rows, n1] = a * b, rounded as in kLinear; c: int64 [rows], first index of each row's largest
    kChoose,  // out: int64 tokens [rows]; a: fp32 logits [..., n0] with row stride n1; b: Draw [rows]
    kLinearHeads,  // out[rows, heads, n1]; a: x [rows, heads, n0], n2 apart; b: packed matrices [n1, n0] of the heads
    kConcat,       // out[rows, n0 + n1] = a[rows, n0], then b[rows, n1]
    kRouterLogits,   // out: fp32 [rows, n1] = a * b + c as in kLinear, not rounded
    kChooseExperts,  // out: fp32 weights [tokens, n1]; a: fp32 logits [tokens, n0 experts]; b: corrections and scales,
                     // fp32 [2, n0], or null; c: int64 ids [tokens, n1]; n2: groups; cache.slots: groups of a token;
                     // f0: factor; format: `Choosing`
    kExperts,  // out[tokens, n0]; a: x with row stride n2; b: ids, c: weights, as above with cache.kv_heads of a token;
               // cache.keys: cache.slots experts (see experts.h), each with inner size n1; format: `ExpertActivation`
    kAddGated,  // out[rows, n0] = a + sigmoid(c[row]) * b
    kSigmoidAndMul,  // out[rows, n0] = sigmoid(a) * b
    // out[tokens, heads * n0 value dims]; a: x for n1 key heads; b: gates; c: time steps; d: rates, fp32 [2, heads];
    // n2: as n1 of kSelectiveScan
    kGatedDeltaRule,
    kLayerNorm,   // out[rows, n0]; a: x with row stride n1; b: weight; c: bias, or null; d: [rows, n0], added to x first,
                  // or null; f0: eps
    kGelu,        // out[rows, n0] = gelu(a); n2: whether in its tanh form
    kGeluAndMul,  // out[rows, n0] = gelu(a) * b; b has row stride n1
    kAdapt,       // out[rows, n1] += scale * (up (down a[rows, n0]) + bias); n2: row stride of a; b: LowRank of each slot;
                  // c: int64 slot of each row, or null for step.adapters; format: `Type` of the adapters
    kKinds,
};

// See `Routing` of ../../../../core/experts.py.
enum Choosing : int64_t { kScoresSigmoid = 1, kNormalize = 2, kScoreOfTwo = 4 };
constexpr int64_t kMostGroups = 64;
enum ExpertActivation : int64_t { kExpertSilu, kExpertGeluTanh, kExpertClampedSwiglu };

// See ../../interface.py.
enum NormKind : int64_t { kNormRounded, kNormUnitOffset, kNormWide };

enum Error : int { kNoSuchToken = 1, kNoSuchSlot = 2, kNoMemory = 3, kNoSuchExpert = 4, kNoSuchState = 5 };

enum Type : int32_t { kBf16, kFp32, kTypes };
constexpr int64_t padded_in(int32_t type, int64_t in) { return type == kBf16 ? round_up(in, kDepth) : in; }
constexpr int64_t packed_elements(int32_t type, int64_t out, int64_t in) {
    return round_up(out, kLanes) * padded_in(type, in);
}

// See `Draw` of ../../choosing.py.
struct Draw {
    int64_t row;
    double temperature;
    int64_t top_k;
    double min_p, top_p;
    uint64_t seed;
    int64_t position;
};

// The 8-bit codes of keys and values, see `KVCode` of ../../codes.py.
enum CacheFormat : int64_t { kCacheWhole, kCacheInt8, kCacheFp8 };

// One layer's keys and values: [slots, kv_heads, block_tokens, head_dim]. Strides are in elements; head_dim's is 1. If
// they are coded, strides are in bytes, and token_stride is a sixteenth of the bytes of a tile (see coded.h).
// kLinearHeads has only `kv_heads`. A part of a layer's state, in fp32, has only `keys`, `slots` and `slot_stride`. A
// recurrence's state also has `kv_heads`, `head_dim` (that of keys for the gated delta rule), and its pending inputs in
// `values`.
struct Cache {
    void *keys, *values;
    int64_t slots, kv_heads, head_dim;
    int64_t slot_stride, head_stride, token_stride;
};

struct Op {
    int32_t kind, type;
    int64_t rows;  // rows of the operands for each token of the step
    void* out;
    const void *a, *b, *c, *d;
    int64_t n0, n1, n2;
    float f0, f1;
    Cache cache;
    int64_t group;
    int64_t format;  // `Format` of the weights
    // Number of operations of the same kind, kLinear or kAdapt, after this one that are computed with it. They have the
    // same `a`, and their weights are all quantized, all compressed, or all whole.
    int64_t joined;
};
constexpr int64_t kMostJoined = 4;  // including the first one

// One adapter's part for a layer, see `LowRank` of ../../adapters.py: down [rank, in], up [rank, out], bias [out] or null,
// and factors [out] or null. The rank is 0 if the adapter has no part for the layer.
struct LowRank {
    const void *down, *up, *bias;
    const float* factors;
    int64_t rank;
    float scale;
    int32_t unused;
};
constexpr int64_t kMostRank = 512;

// See `GroupTables` of ../../batch.py.
struct Group {
    int64_t block_tokens, window, table_width;
    const int32_t* tables;
    const int64_t *write_slots, *write_offsets;
};

// See `AttentionBatch`.
struct Step {
    int64_t tokens, requests;
    const int64_t *query_start, *context_len, *final_len, *last_keys;
    const int64_t *token_ids, *positions;  // input of kEmbed and kRotation if their `a` is null
    const Group* groups;
    const int64_t* adapters;  // slot of each token's adapter, negative for none; null if no token has one
};

using Kernel = void (*)(const Op&, const Step&, Team&);
// [type][kind], one table for each instruction set.
using KernelTable = const Kernel* [kTypes];
extern const KernelTable portable_kernels, avx2_kernels, avx512_kernels, avx512_bf16_kernels, amx_kernels;
extern const KernelTable neon_kernels, neon_bf16_kernels;

}  // namespace paceline

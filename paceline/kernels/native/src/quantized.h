// Linear layers and the embedding over weights that stay in blocks of 4 or 8 bits; see `Format` of program.h.
//
// A weight is bf16(value * scale + offset), with one rounding to fp32 before. Tiles are unpacked to the layout of packed
// bf16 or fp32 weights just before they are multiplied, by the product that those have: so results are those of such
// weights bit for bit, in every instruction set, for one row and for many.

constexpr int64_t kPrefetchBytes = 8192;  // ahead of the tile that is unpacked
constexpr int64_t kStrip = 4 * kDepth;    // values along `in` whose unpacked tiles stay in a core's first cache

struct TileLayout {
    int64_t bits, scale_bytes, scales_per_block;
    bool offsets;

    explicit TileLayout(int64_t format)
        : bits(format & kFormatEightBits ? 8 : 4),
          scale_bytes(format & kFormatWideScales ? 4 : 2),
          scales_per_block(format & kFormatTwoScales ? 2 : 1),
          offsets(format & kFormatOffsets) {}

    int64_t code_bytes() const { return kLanes * kDepth * bits / 8; }
    int64_t scales_bytes() const { return kLanes * scale_bytes * scales_per_block; }
    int64_t tile_bytes() const { return code_bytes() + scales_bytes() * (offsets ? 2 : 1); }
};

// Numbers in fp16, none of them infinite.
static inline f32x16 widen_fp16(u16x16 half) {
#ifdef PACELINE_AVX512
    return bits<f32x16>(_mm512_cvtph_ps(bits<__m256i>(half)));
#else
    const u32x16 word = __builtin_convertvector(half, u32x16);
    // The exponent's bias differs: an exact multiplication mends it, of subnormal numbers too.
    const f32x16 magnitude = bits<f32x16>((word & 0x7fff) << 13) * 0x1p112f;
    return bits<f32x16>(bits<u32x16>(magnitude) | (word & 0x8000) << 16);
#endif
}

static inline f32x16 load_scales(const uint8_t* from, int64_t scale_bytes) {
    return scale_bytes == 2 ? widen_fp16(read<u16x16>(from)) : read<f32x16>(from);
}

// The pairs of bf16 that eight outputs have at two places along `in`, from sixteen such numbers, and eight more outputs.
static inline u32x16 round_pairs(f32x16 first, f32x16 second) {
#ifdef PACELINE_AVX512
    return bits<u32x16>(_mm512_cvtne2ps_pbh(bits<__m512>(second), bits<__m512>(first)));
#else
    const u16x16 halves[2] = {narrow(first), narrow(second)};
    return read<u32x16>(halves);
#endif
}

// Rows of a tile of packed weights: pairs of bf16 side by side, or fp32 one below the other.
static inline void store_pairs(bf16* tile, int64_t row, u32x16 pairs) { memcpy(tile + row * 32, &pairs, 64); }
static inline void store_pairs(float* tile, int64_t row, u32x16 pairs) {
    store(tile + row * 32, bits<f32x16>(pairs << 16));
    store(tile + row * 32 + 16, bits<f32x16>(pairs & 0xffff0000u));
}

// The table's entry for the low four bits of each lane.
static inline f32x16 look_up(u32x16 codes, f32x16 table) {
#ifdef PACELINE_AVX512
    return bits<f32x16>(_mm512_permutexvar_ps(bits<__m512i>(codes), bits<__m512>(table)));
#else
    return __builtin_convertvector(bits<i32x16>(codes & 15), f32x16) + table[0];
#endif
}

// What one tile's codes stand for: `half` of pair-row `row`, that is eight outputs' values at 2 * row and 2 * row + 1.
struct Nibbles {
    f32x16 table;
    explicit Nibbles(bool unsigned_)
        : table(f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - (unsigned_ ? 0.0f : 8.0f)) {}
    f32x16 operator()(const uint8_t* codes, int64_t row, int64_t half) const {
        return look_up(read<u32x16>(codes + row / 4 * 64) >> static_cast<uint32_t>(row % 4 * 8 + half * 4), table);
    }
};
struct Bytes {
    explicit Bytes(bool) {}
    f32x16 operator()(const uint8_t* codes, int64_t row, int64_t half) const {
        typedef int8_t i8x16 __attribute__((vector_size(16)));
        const i8x16 own = read<i8x16>(codes + row * 32 + half * 16);
#ifdef PACELINE_AVX512
        return bits<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits<__m128i>(own))));
#else
        return __builtin_convertvector(own, f32x16);
#endif
    }
};

template <class Codes, class T>
static inline void unpack_tile(const uint8_t* tile, const TileLayout& layout, T* to) {
    constexpr u32x16 low = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    const Codes codes(layout.offsets);
    const uint8_t* scales = tile + layout.code_bytes();
    f32x16 scale[2] = {}, offset[2] = {};
    for (int64_t part = 0; part < 2; ++part) {
        if (part < layout.scales_per_block) {
            const int64_t place = part * kLanes * layout.scale_bytes;
            const f32x16 own = load_scales(scales + place, layout.scale_bytes);
            for (int half = 0; half < 2; ++half) scale[half] = __builtin_shuffle(own, low + 8 * half);
            if (layout.offsets) {
                const f32x16 added = load_scales(scales + layout.scales_bytes() + place, layout.scale_bytes);
                for (int half = 0; half < 2; ++half) offset[half] = __builtin_shuffle(added, low + 8 * half);
            }
        }
#pragma GCC unroll 8
        for (int64_t i = 0; i < 8; ++i) {
            const int64_t row = part * 8 + i;
            store_pairs(to, row, round_pairs(fma(codes(tile, row, 0), scale[0], offset[0]),
                                             fma(codes(tile, row, 1), scale[1], offset[1])));
        }
    }
}

// Unpacks `count` tiles of sixteen outputs along `in`; between two of them lie those of the other groups.
template <class T>
static void unpack(const uint8_t* tiles, const TileLayout& layout, int64_t groups, int64_t count, T* to) {
    const int64_t bytes = layout.tile_bytes();
    for (int64_t tile = 0; tile < count; ++tile, tiles += groups * bytes, to += kLanes * kDepth) {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(tiles + kPrefetchBytes + line);
        if (layout.bits == 4) unpack_tile<Nibbles>(tiles, layout, to);
        else unpack_tile<Bytes>(tiles, layout, to);
    }
}

// Calls finish(row, sums) for the rows of a chunk and one panel of kOutBlock outputs, whose tiles begin at `tiles`.
template <class T, class Finish>
static void multiply_tiles_of(const Input<T>& input, Worker& worker, int64_t chunk, const uint8_t* tiles,
                              const TileLayout& layout, int64_t groups, const Finish& finish) {
    const int64_t in = input.in, rows = input.rows;
    // Few rows: unpack a strip, multiply, and go on. Many rows: unpack once for all of them.
    const int64_t strip = rows > kRowBlock ? in : least(in, kStrip);
    T* unpacked = static_cast<T*>(worker.scratch.take(kOutBlock * strip * sizeof(T)));
    const auto unpack_strip = [&](int64_t k, int64_t depth) {
        for (int64_t group = 0; group < groups; ++group)
            unpack(tiles + (k / kDepth * groups + group) * layout.tile_bytes(), layout, groups, depth / kDepth,
                   unpacked + group * strip * kLanes);
    };
    if (rows > kRowBlock) {
        unpack_strip(0, in);
        Panel<T> panel{unpacked, nullptr, groups};
        return input.multiply_chunk(worker, chunk, &panel, 1, finish);
    }
    alignas(64) float sums[kRowBlock * kOutBlock];
    for (int64_t k = 0; k < in; k += strip) {
        const int64_t depth = least(strip, in - k);
        unpack_strip(k, depth);
        multiply(worker, input.x + k, input.stride, unpacked, strip * kLanes, depth, rows, groups, sums, kOutBlock,
                 Extra{k > 0});
    }
    if (!worker.may_write()) return;
    for (int64_t row = 0; row < rows; ++row) finish(row, sums + row * kOutBlock);
}

template <class T>
static void quantized_linear(const Op& op, const Step& step, Team& team) {
    if (op.rows * step.tokens == 0) return;
    const Input<T> input = input_of<T>(op, step, team, round_up(op.n0, kDepth));
    const TileLayout layout(op.format);
    const uint8_t* weights = static_cast<const uint8_t*>(op.b);
    const T* bias = static_cast<const T*>(op.c);
    T* out = static_cast<T*>(op.out);
    const int64_t outputs = op.n1, blocks = (outputs + kOutBlock - 1) / kOutBlock;
    const int64_t group_bytes = input.in / kDepth * layout.tile_bytes();
    team.for_each_restartable(input.chunks * blocks, itself, [=](int64_t task, Worker& worker) {
        const int64_t first = task % blocks * kOutBlock, count = least(kOutBlock, outputs - first);
        multiply_tiles_of(input, worker, task / blocks, weights + first / kLanes * group_bytes, layout,
                          count > kLanes ? 2 : 1, [&](int64_t row, const float* sums) {
            finish(sums, bias ? bias + first : nullptr, out + row * outputs + first, count);
        });
    });
}

template <class T>
static void quantized_embed(const Op& op, const Step& step, Team& team) {
    const int64_t* ids = op.a ? static_cast<const int64_t*>(op.a) : step.token_ids;
    const uint8_t* weights = static_cast<const uint8_t*>(op.b);
    const TileLayout layout(op.format);
    const int64_t in = round_up(op.n0, kDepth), group_bytes = in / kDepth * layout.tile_bytes();
    team.for_each(op.rows * step.tokens, [&](int64_t token, Worker& worker) {
        const int64_t id = ids[token];
        if (id < 0 || id >= op.n1) return team.fail(kNoSuchToken);
        T* panel = static_cast<T*>(worker.scratch.take(kLanes * in * sizeof(T)));
        const int64_t first_out = id / kOutBlock * kOutBlock, groups = op.n1 - first_out > kLanes ? 2 : 1;
        unpack(weights + first_out / kLanes * group_bytes + (id - first_out) / kLanes * layout.tile_bytes(), layout,
               groups, in / kDepth, panel);
        copy_row(panel, id % kLanes, op.n0, op.f0, static_cast<T*>(op.out) + token * op.n0);
    });
}

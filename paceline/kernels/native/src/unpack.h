// Tiles of quantized weights, and how they are unpacked to packed weights; see `Format` of program.h.
//
// A weight is value * scale + offset, rounded to fp32, then as the format says, then to the type of x.

constexpr int64_t kPrefetchBytes = 8192;  // distance of the prefetch from the tile that is unpacked

// What unpacked weights are rounded to, before a type of 16 bits rounds them as it holds them.
enum class Rounding { kNone, kBf16, kHalf, kHalfThenBf16 };

struct TileLayout {
    int64_t bits, scale_bytes, scales_per_block;
    bool offsets, rows;
    Rounding rounding;

    TileLayout() = default;
    // `widens`: whether x is bf16, but weights are unpacked to fp32.
    TileLayout(int64_t format, bool widens)
        : bits(format & kFormatEightBits ? 8 : 4),
          scale_bytes(format & kFormatWideScales ? 4 : 2),
          scales_per_block(format & kFormatTwoScales ? 2 : 1),
          offsets(format & kFormatOffsets),
          rows(format & kFormatRows),
          rounding(format & kFormatHalf                  ? widens ? Rounding::kHalfThenBf16 : Rounding::kHalf
                   : format & kFormatUnrounded && !widens ? Rounding::kNone
                                                          : Rounding::kBf16) {}

    int64_t code_bytes() const { return kLanes * kDepth * bits / 8; }
    int64_t scales_bytes() const { return kLanes * scale_bytes * scales_per_block; }
    int64_t tile_bytes() const { return code_bytes() + scales_bytes() * (offsets ? 2 : 1); }
};

// Converts fp16 numbers, none of them infinite.
PACELINE_INLINE f32x16 widen_fp16(u16x16 half) {
#ifdef PACELINE_AVX512
    return bits<f32x16>(_mm512_cvtph_ps(bits<__m256i>(half)));
#elif defined(PACELINE_AVX2)
    return {bits<f32x8>(_mm256_cvtph_ps(bits<__m128i>(low_half(half)))),
            bits<f32x8>(_mm256_cvtph_ps(bits<__m128i>(high_half(half))))};
#elif defined(PACELINE_NEON)
    const auto eight = [](const Vector<uint16_t, 8>& own) PACELINE_INLINED {
        const float16x8_t values = bits<float16x8_t>(own);
        return f32x8{bits<Vector<float, 4>>(vcvt_f32_f16(vget_low_f16(values))),
                     bits<Vector<float, 4>>(vcvt_high_f32_f16(values))};
    };
    return {eight(half.low), eight(half.high)};
#else
    const u32x16 word = convert<u32x16>(half);
    // The exponent's bias differs. An exact multiplication corrects it, also for subnormal numbers.
    const f32x16 magnitude = bits<f32x16>((word & 0x7fff) << 13) * 0x1p112f;
    return bits<f32x16>(bits<u32x16>(magnitude) | (word & 0x8000) << 16);
#endif
}

// Rounds to fp16 to the nearest, ties to even. Numbers that are too large become infinite.
PACELINE_INLINE f32x16 round_to_half(f32x16 value) {
#ifdef PACELINE_AVX512
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return bits<f32x16>(_mm512_cvtph_ps(_mm512_cvtps_ph(bits<__m512>(value), nearest)));
#elif defined(PACELINE_AVX2)
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const auto eight = [](const f32x8& own) PACELINE_INLINED {
        return bits<f32x8>(_mm256_cvtph_ps(_mm256_cvtps_ph(bits<__m256>(own), nearest)));
    };
    return {eight(value.low), eight(value.high)};
#else
    const u32x16 word = bits<u32x16>(value), sign = word & 0x80000000u;
    const f32x16 magnitude = bits<f32x16>(word ^ sign);
    // Eleven significant bits, or a multiple of 2^-24, which is an ulp of the number that is added.
    const u32x16 normal = (bits<u32x16>(magnitude) + (0xfff + (word >> 13 & 1))) & 0xffffe000u;
    const f32x16 small = (magnitude + 0x1.8p-1f) - 0x1.8p-1f;
    const u32x16 rounded = select(magnitude < splat(0x1p-14f), bits<u32x16>(small), normal);
    const u32x16 infinite = splat<u32x16>(0x7f800000u);
    return bits<f32x16>(select(bits<f32x16>(rounded) < splat(0x1p16f), rounded, infinite) | sign);
#endif
}

PACELINE_INLINE f32x16 load_scales(const uint8_t* from, int64_t scale_bytes) {
    return scale_bytes == 2 ? widen_fp16(read<u16x16>(from)) : read<f32x16>(from);
}

#ifdef PACELINE_AMX
// Rounds values at two places along `in` to bf16 pairs. `first` and `second` have eight outputs each.
PACELINE_INLINE u32x16 round_pairs(f32x16 first, f32x16 second) {
    return bits<u32x16>(_mm512_cvtne2ps_pbh(bits<__m512>(second), bits<__m512>(first)));
}

// Rounds pairs and stores them in a tile of packed weights: bf16 as one row of pairs, fp32 as two rows.
template <Rounding kRounding>
PACELINE_INLINE void store_pairs(bf16* tile, int64_t row, f32x16 first, f32x16 second) {
    if (kRounding == Rounding::kHalf) first = round_to_half(first), second = round_to_half(second);
    write(tile + row * 32, round_pairs(first, second));
}
template <Rounding kRounding>
PACELINE_INLINE void store_pairs(float* tile, int64_t row, f32x16 first, f32x16 second) {
    if (kRounding == Rounding::kBf16) {
        const u32x16 pairs = round_pairs(first, second);
        store(tile + row * 32, bits<f32x16>(pairs << 16));
        store(tile + row * 32 + 16, bits<f32x16>(pairs & 0xffff0000u));
        return;
    }
    if (kRounding == Rounding::kHalf) first = round_to_half(first), second = round_to_half(second);
    constexpr auto places = make<i32x16>([](int i) { return 2 * i; });
    store(tile + row * 32, __builtin_shuffle(first, second, places));
    store(tile + row * 32 + 16, __builtin_shuffle(first, second, places + 1));
}

// Returns the table's entry for the low four bits of each lane.
PACELINE_INLINE f32x16 look_up(u32x16 codes, f32x16 table) {
    return bits<f32x16>(_mm512_permutexvar_ps(bits<__m512i>(codes), bits<__m512>(table)));
}

// The values of one tile's codes: of the eight outputs of `half`, at 2 * row and 2 * row + 1 along `in`.
struct Nibbles {
    f32x16 table;
    explicit Nibbles(bool unsigned_)
        : table(lane_numbers<f32x16>() - (unsigned_ ? 0.0f : 8.0f)) {}
    f32x16 operator()(const uint8_t* codes, int64_t row, int64_t half) const {
        return look_up(read<u32x16>(codes + row / 4 * 64) >> static_cast<uint32_t>(row % 4 * 8 + half * 4), table);
    }
};
struct Bytes {
    explicit Bytes(bool) {}
    f32x16 operator()(const uint8_t* codes, int64_t row, int64_t half) const {
        const auto own = read<Vector<int8_t, 16>>(codes + row * 32 + half * 16);
        return bits<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits<__m128i>(own))));
    }
};

template <class Codes, Rounding kRounding, class T>
static inline void unpack_tile(const uint8_t* tile, const TileLayout& layout, T* to) {
    const Codes codes(layout.offsets);
    const uint8_t* scales = tile + layout.code_bytes();
    f32x16 scale[2] = {}, offset[2] = {};
    for (int64_t part = 0; part < 2; ++part) {
        if (part < layout.scales_per_block) {
            const int64_t place = part * kLanes * layout.scale_bytes;
            const f32x16 own = load_scales(scales + place, layout.scale_bytes);
            interleave(own, own, scale[0], scale[1]);
            if (layout.offsets) {
                const f32x16 added = load_scales(scales + layout.scales_bytes() + place, layout.scale_bytes);
                interleave(added, added, offset[0], offset[1]);
            }
        }
#pragma GCC unroll 8
        for (int64_t i = 0; i < 8; ++i) {
            const int64_t row = part * 8 + i;
            store_pairs<kRounding>(to, row, fma(codes(tile, row, 0), scale[0], offset[0]),
                                   fma(codes(tile, row, 1), scale[1], offset[1]));
        }
    }
}
#else
// Rounds finite numbers to what bf16 can hold.
template <class V>
PACELINE_INLINE V round_finite(const V& value) {
    using U = Vector<uint32_t, Shape<V>::kCount>;
    const U word = bits<U>(value);
    return bits<V>((word + ((word >> 16 & 1) + 0x7fff)) & 0xffff0000u);
}

// The codes of one tile for eight values along `in`, in registers. at(i): those of sixteen outputs for one value.
struct Nibbles {
    u32x16 words;
    float zero;

    Nibbles(const uint8_t* codes, int64_t eight, bool unsigned_)
        : words(read<u32x16>(codes + eight * 64)), zero(unsigned_ ? 0.0f : 8.0f) {}
    f32x16 at(int i) const {
        return convert<f32x16>(bits<i32x16>(words >> (i % 2 * 16 + i / 2 * 4) & 15)) - zero;
    }
};
struct Bytes {
    u32x16 pairs[4];

    Bytes(const uint8_t* codes, int64_t eight, bool) {
        for (int i = 0; i < 4; ++i) pairs[i] = convert<u32x16>(read<u16x16>(codes + (4 * eight + i) * 32));
    }
    f32x16 at(int i) const {
        return convert<f32x16>(bits<i32x16>(pairs[i / 2] << (i % 2 ? 16 : 24)) >> 24);
    }
};

template <Rounding kRounding>
PACELINE_INLINE f32x16 round_weights(const f32x16& value) {
    switch (kRounding) {
        case Rounding::kNone: return value;
        case Rounding::kBf16: return round_finite(value);
        case Rounding::kHalf: return round_to_half(value);
        case Rounding::kHalfThenBf16: return round_finite(round_to_half(value));
    }
}

// Rounds values at two places along `in`, and stores them in a tile of packed weights from the first place on.
template <Rounding kRounding>
PACELINE_INLINE void store_places(float* to, const f32x16& first, const f32x16& second) {
    store(to, round_weights<kRounding>(first));
    store(to + kLanes, round_weights<kRounding>(second));
}
template <Rounding kRounding>
PACELINE_INLINE void store_places(bf16* to, const f32x16& first, const f32x16& second) {
    constexpr Rounding before = kRounding == Rounding::kHalf ? kRounding : Rounding::kNone;
    u16x16 pairs[2];
    interleave(narrow(round_weights<before>(first)), narrow(round_weights<before>(second)), pairs[0], pairs[1]);
    write(to, pairs[0]);
    write(to + kLanes, pairs[1]);
}

template <class Codes, Rounding kRounding, class T>
static inline void unpack_tile(const uint8_t* tile, const TileLayout& layout, T* to) {
    const uint8_t* scales = tile + layout.code_bytes();
    f32x16 scale = {}, offset = {};
    for (int64_t eight = 0; eight < 4; ++eight) {
        if (const int64_t part = eight / 2; eight % 2 == 0 && part < layout.scales_per_block) {
            const int64_t place = part * kLanes * layout.scale_bytes;
            scale = load_scales(scales + place, layout.scale_bytes);
            if (layout.offsets) offset = load_scales(scales + layout.scales_bytes() + place, layout.scale_bytes);
        }
        const Codes codes(tile, eight, layout.offsets);
        unrolled<4>([&](int i) PACELINE_INLINED {
            store_places<kRounding>(to + (eight * 8 + 2 * i) * kLanes, fma(codes.at(2 * i), scale, offset),
                                    fma(codes.at(2 * i + 1), scale, offset));
        });
    }
}
#endif

static inline void prefetch_tile(const uint8_t* tile, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(tile + kPrefetchBytes + line);
}

#ifdef PACELINE_AMX
// Unpacks nibbles of kFormatRows to [16][32]. The sixteen numbers that an output's codes can mean are computed once and
// looked up, which is half the arithmetic of computing every weight.
static inline void unpack_rows(const uint8_t* tile, const TileLayout& layout, bf16* to) {
    constexpr f32x16 digits = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint8_t* scales = tile + layout.code_bytes();
    alignas(64) float scale[kLanes], offset[kLanes];
    store(scale, load_scales(scales, layout.scale_bytes));
    store(offset, layout.offsets ? load_scales(scales + layout.scales_bytes(), layout.scale_bytes) : f32x16{});
    finish_writes();  // a broadcast of one number is free from memory, but slow from a register
    const f32x16 values = digits - (layout.offsets ? 0.0f : 8.0f);
    const auto numbers = [&](int64_t output) {
        const f32x16 exact = fma(values, splat(scale[output]), splat(offset[output]));
        return bits<__m512>(layout.rounding == Rounding::kHalf ? round_to_half(exact) : exact);
    };
    // One table has the numbers of two outputs. The fifth bit of an index selects the output.
    const __m512i four_bits = _mm512_set1_epi16(15), fifth = _mm512_set1_epi16(16);
#pragma GCC unroll 8
    for (int64_t output = 0; output < kLanes; output += 2) {
        const __m512i codes = read<__m512i>(tile + output / 4 * 64);
        const __m512i table = bits<__m512i>(_mm512_cvtne2ps_pbh(numbers(output + 1), numbers(output)));
        const __m512i first = _mm512_and_si512(_mm512_srli_epi16(codes, output % 4 * 4), four_bits);
        const __m512i second = _mm512_ternarylogic_epi32(
            _mm512_srli_epi16(codes, output % 4 * 4 + 4), four_bits, fifth, 0xea);  // (codes & four_bits) | fifth
        const __m512i rows[2] = {_mm512_permutexvar_epi16(first, table), _mm512_permutexvar_epi16(second, table)};
        memcpy(to + output * kDepth, rows, sizeof(rows));
    }
}

// Unpacks nibbles of kFormatRows to the layout of packed weights. Returns false for all other formats.
static inline bool unpack_nibble_rows(const uint8_t* tile, const TileLayout& layout, bf16* to) {
    if (!layout.rows) return false;
    alignas(64) bf16 rows[kLanes * kDepth];
    unpack_rows(tile, layout, rows);
    u32x16 square[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) square[i] = read<u32x16>(rows + i * kDepth);
    transpose(square);
    for (int64_t i = 0; i < kLanes; ++i) write(to + i * kDepth, square[i]);
    return true;
}
#endif
// Other types and instruction sets have no nibbles of kFormatRows.
template <class T>
static inline bool unpack_nibble_rows(const uint8_t*, const TileLayout&, T*) {
    return false;
}

// Unpacks `count` tiles of one group of sixteen outputs along `in`. They alternate with tiles of the other groups.
template <Rounding kRounding, class T>
static void unpack(const uint8_t* tiles, const TileLayout& layout, int64_t groups, int64_t count, T* to) {
    const int64_t bytes = layout.tile_bytes();
    for (int64_t tile = 0; tile < count; ++tile, tiles += groups * bytes, to += kLanes * kDepth) {
        prefetch_tile(tiles, bytes);
        if (unpack_nibble_rows(tiles, layout, to)) continue;
        if (layout.bits == 4) unpack_tile<Nibbles, kRounding>(tiles, layout, to);
        else unpack_tile<Bytes, kRounding>(tiles, layout, to);
    }
}
template <class T>
static void unpack(const uint8_t* tiles, const TileLayout& layout, int64_t groups, int64_t count, T* to) {
    switch (layout.rounding) {
        case Rounding::kBf16: return unpack<Rounding::kBf16>(tiles, layout, groups, count, to);
        case Rounding::kHalf: return unpack<Rounding::kHalf>(tiles, layout, groups, count, to);
        case Rounding::kNone: return unpack<Rounding::kNone>(tiles, layout, groups, count, to);
        case Rounding::kHalfThenBf16: return unpack<Rounding::kHalfThenBf16>(tiles, layout, groups, count, to);
    }
}

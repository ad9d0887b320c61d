// How tiles of quantized weights (layout.h) are unpacked to packed weights.
//
// A weight is value * scale + offset, rounded to fp32, then as the format says, then to the type of x.

constexpr int64_t kPrefetchBytes = 8192;  // distance of the prefetch from the tile that is unpacked

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

// Rounds finite numbers to what bf16 can hold.
template <class V>
PACELINE_INLINE V round_finite(const V& value) {
    using U = Vector<uint32_t, Shape<V>::kCount>;
    const U word = bits<U>(value);
    return bits<V>((word + ((word >> 16 & 1) + 0x7fff)) & 0xffff0000u);
}

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
PACELINE_INLINE void store_places(float* to, const TwoPlaces& weights) {
    store(to, round_weights<kRounding>(weights.first));
    store(to + kLanes, round_weights<kRounding>(weights.second));
}
template <Rounding kRounding>
PACELINE_INLINE void store_places(bf16* to, const TwoPlaces& weights) {
    constexpr Rounding before = kRounding == Rounding::kHalf ? kRounding : Rounding::kNone;
    const f32x16 first = round_weights<before>(weights.first), second = round_weights<before>(weights.second);
#if defined(PACELINE_AVX512) && defined(PACELINE_BF16_PRODUCTS)
    constexpr auto places = make<Vector<int16_t, 32>>([](int i) { return i / 2 + i % 2 * 16; });
    const __m512i both = bits<__m512i>(_mm512_cvtne2ps_pbh(bits<__m512>(second), bits<__m512>(first)));
    write(to, _mm512_maskz_permutexvar_epi16(0xffffffff, bits<__m512i>(places), both));
#elif defined(PACELINE_BF16_PRODUCTS)
    u16x16 pairs[2];
    interleave(narrow(first), narrow(second), pairs[0], pairs[1]);
    write(to, pairs[0]);
    write(to + kLanes, pairs[1]);
#else
    write(to, bits<u32x16>(round_finite(first)) >> 16 | bits<u32x16>(round_finite(second)));
#endif
}

// Unpacks a block by one kind of codes.
template <class Codes, Rounding kRounding, class T>
static inline void unpack_block(const TileLayout::Block& block, const TileLayout& layout, T* to) {
    f32x16 scale = {}, offset = {};
    for (int64_t eight = 0; eight < 4; ++eight) {
        if (const int64_t part = eight / 2; eight % 2 == 0 && part < layout.scales_per_block)
            load_part(block, layout, part, scale, offset);
        const Codes codes(block.codes, eight, layout);
        unrolled<4>([&](int pair) PACELINE_INLINED {
            store_places<kRounding>(to + (eight * 8 + 2 * pair) * kLanes, codes.weights(pair, scale, offset));
        });
    }
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

// The values of one tile's codes: of the eight outputs of `half`, at 2 * row and 2 * row + 1 along `in`.
struct Nibbles {
    alignas(64) float table[kLanes];
    explicit Nibbles(bool unsigned_) { store(table, lane_numbers<f32x16>() - (unsigned_ ? 0.0f : 8.0f)); }
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
static inline void unpack_by_pairs(const TileLayout::Block& block, const TileLayout& layout, T* to) {
    const Codes codes(layout.offsets);
    f32x16 scale[2] = {}, offset[2] = {};
    for (int64_t part = 0; part < 2; ++part) {
        if (part < layout.scales_per_block) {
            f32x16 own = {}, added = {};
            load_part(block, layout, part, own, added);
            interleave(own, own, scale[0], scale[1]);
            interleave(added, added, offset[0], offset[1]);
        }
#pragma GCC unroll 8
        for (int64_t i = 0; i < 8; ++i) {
            const int64_t row = part * 8 + i;
            store_pairs<kRounding>(to, row, fma(codes(block.codes, row, 0), scale[0], offset[0]),
                                   fma(codes(block.codes, row, 1), scale[1], offset[1]));
        }
    }
}
#endif

static inline void prefetch_tile(const uint8_t* tile, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(tile + kPrefetchBytes + line);
}

#ifdef PACELINE_AMX
// Unpacks nibbles of kFormatRows to [16][32]. The sixteen numbers that an output's codes can mean are computed once and
// looked up, which is half the arithmetic of computing every weight.
template <int Scales>
static inline void unpack_rows(const TileLayout::Block& block, const TileLayout& layout, bf16* to) {
    constexpr f32x16 digits = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    alignas(64) float scales[Scales][kLanes], offsets[Scales][kLanes];
    for (int part = 0; part < Scales; ++part) {
        f32x16 scale = {}, offset = splat(-0.0f);  // the sum with it is the other number
        load_part(block, layout, part, scale, offset);
        store(scales[part], scale);
        store(offsets[part], offset);
    }
    finish_writes();  // a broadcast of one number is free from memory, but slow from a register
    const f32x16 values = layout.table ? load(layout.head->numbers) : digits - layout.zero();
    const auto numbers = [&](int64_t output, int part) {
        const f32x16 exact = fma(values, splat(scales[part][output]), splat(offsets[part][output]));
        return bits<__m512>(layout.rounding == Rounding::kHalf ? round_to_half(exact) : exact);
    };
    // One table has the numbers of two outputs, or those of both scales of one output. The fifth bit of an index selects.
    const __m512i four_bits = _mm512_set1_epi16(15), fifth = _mm512_set1_epi16(16);
    const __m512i upper = _mm512_maskz_set1_epi16(0xffff0000, 16);
    constexpr int kOutputs = 3 - Scales;
#pragma GCC unroll 16
    for (int64_t output = 0; output < kLanes; output += kOutputs) {
        const __m512i codes = read<__m512i>(block.codes + output / 4 * 64);
        const __m512 more = Scales == 1 ? numbers(output + 1, 0) : numbers(output, Scales - 1);
        const __m512i table = bits<__m512i>(_mm512_cvtne2ps_pbh(more, numbers(output, 0)));
        for (int64_t i = 0; i < kOutputs; ++i) {
            const __m512i places = _mm512_srli_epi16(codes, output % 4 * 4 + i * 4);
            const __m512i added = Scales == 2 ? upper : i ? fifth : _mm512_setzero_si512();
            // (places & four_bits) | added
            const __m512i index = _mm512_ternarylogic_epi32(places, four_bits, added, 0xea);
            write(to + (output + i) * kDepth, _mm512_permutexvar_epi16(index, table));
        }
    }
}
static inline void unpack_rows(const TileLayout::Block& block, const TileLayout& layout, bf16* to) {
    if (layout.scales_per_block == 2) unpack_rows<2>(block, layout, to);
    else unpack_rows<1>(block, layout, to);
}

// Unpacks nibbles of kFormatRows to the layout of packed weights. Returns false for all other formats.
static inline bool unpack_nibble_rows(const TileLayout::Block& block, const TileLayout& layout, bf16* to) {
    if (!layout.rows) return false;
    alignas(64) bf16 rows[kLanes * kDepth];
    unpack_rows(block, layout, rows);
    u32x16 square[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) square[i] = read<u32x16>(rows + i * kDepth);
    transpose(square);
    for (int64_t i = 0; i < kLanes; ++i) write(to + i * kDepth, square[i]);
    return true;
}
#endif
// Other types and instruction sets have no nibbles of kFormatRows.
template <class T>
static inline bool unpack_nibble_rows(const TileLayout::Block&, const TileLayout&, T*) {
    return false;
}

// Unpacks a block of a tile.
template <Rounding kRounding, class T>
static inline void unpack_one(const TileLayout::Block& block, const TileLayout& layout, T* to) {
    if (unpack_nibble_rows(block, layout, to)) return;
    if (layout.table) return unpack_block<TablePlaces, kRounding>(block, layout, to);
    if (layout.floats) return unpack_block<Float8s, kRounding>(block, layout, to);
    if (layout.bits == 2) return unpack_block<BitPlanes<2>, kRounding>(block, layout, to);
    if (layout.bits == 3) return unpack_block<BitPlanes<3>, kRounding>(block, layout, to);
    if (layout.bits == 5) return unpack_block<BitPlanes<5>, kRounding>(block, layout, to);
    if (layout.bits == 6) return unpack_block<BitPlanes<6>, kRounding>(block, layout, to);
#ifdef PACELINE_AMX
    if (layout.bits == 4) unpack_by_pairs<Nibbles, kRounding>(block, layout, to);
    else unpack_by_pairs<Bytes, kRounding>(block, layout, to);
#else
    if (layout.bits == 4) unpack_block<BitPlanes<4>, kRounding>(block, layout, to);
    else unpack_block<Bytes, kRounding>(block, layout, to);
#endif
}

// Unpacks blocks [first, end) along `in` of one group of sixteen outputs, whose tiles alternate with those of the other
// groups.
template <Rounding kRounding, class T>
static void unpack(const uint8_t* tiles, const TileLayout& layout, int64_t groups, int64_t first, int64_t end, T* to) {
    const int64_t bytes = layout.tile_bytes() >> layout.span;
    for (int64_t index = first; index < end; ++index, to += kLanes * kDepth) {
        const TileLayout::Block block = layout.block(tiles, groups, index);
        prefetch_tile(block.codes, bytes);
        unpack_one<kRounding>(block, layout, to);
    }
}
template <class T>
static void unpack(const uint8_t* tiles, const TileLayout& layout, int64_t groups, int64_t first, int64_t end, T* to) {
    switch (layout.rounding) {
        case Rounding::kBf16: return unpack<Rounding::kBf16>(tiles, layout, groups, first, end, to);
        case Rounding::kHalf: return unpack<Rounding::kHalf>(tiles, layout, groups, first, end, to);
        case Rounding::kNone: return unpack<Rounding::kNone>(tiles, layout, groups, first, end, to);
        case Rounding::kHalfThenBf16: return unpack<Rounding::kHalfThenBf16>(tiles, layout, groups, first, end, to);
    }
}

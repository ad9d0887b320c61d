// The layout of tiles of quantized weights, and their scales; see `Format` of program.h.

// What unpacked weights are rounded to, before a type of 16 bits rounds them as it holds them.
enum class Rounding { kNone, kBf16, kHalf, kHalfThenBf16 };
// What scales are stored as: numbers, powers of two as their exponents (E8M0), floats of 8 bits (E4M3) times a factor, or
// small whole numbers times numbers of the tile.
enum class Scaling { kHalf, kFloat, kPowers, kFloat8, kBytes, kSixBits, kFourBits };

struct TileLayout {
    const Head* head;  // null if there is none
    int64_t bits, scale_bytes, scales_per_block;
    int64_t span;  // log2 of the number of blocks of a tile
    bool offsets, rows, floats, table;
    bool halves;  // whether numbers of the table are halves of whole numbers
    Scaling scaling;
    Rounding rounding;

    TileLayout() = default;
    // `widens`: whether x is bf16, but weights are unpacked to fp32.
    TileLayout(const void* data, int64_t format, bool widens)
        : head(format & kFormatsWithHead ? static_cast<const Head*>(data) : nullptr),
          bits(format & kFormatEightBits   ? 8
               : format & kFormatSixBits   ? 6
               : format & kFormatFiveBits  ? 5
               : format & kFormatThreeBits ? 3
               : format & kFormatTwoBits   ? 2
                                           : 4),
          scale_bytes(format & (kFormatPowerScales | kFormatFloatScales) ? 1 : format & kFormatWideScales ? 4 : 2),
          scales_per_block(format & kFormatTwoScales ? 2 : 1),
          span(format >> kFormatSpanShift & 3),
          offsets(format & kFormatOffsets),
          rows(format & kFormatRows),
          floats(format & kFormatFloats),
          table(format & kFormatTable),
          halves(format & kFormatHalves),
          scaling(format & kFormatPowerScales     ? Scaling::kPowers
                  : format & kFormatFloatScales   ? Scaling::kFloat8
                  : format & kFormatByteScales    ? Scaling::kBytes
                  : format & kFormatSixBitScales  ? Scaling::kSixBits
                  : format & kFormatFourBitScales ? Scaling::kFourBits
                  : format & kFormatWideScales    ? Scaling::kFloat
                                                  : Scaling::kHalf),
          rounding(format & kFormatHalf                  ? widens ? Rounding::kHalfThenBf16 : Rounding::kHalf
                   : format & kFormatUnrounded && !widens ? Rounding::kNone
                                                          : Rounding::kBf16) {}

    int64_t head_bytes() const { return head ? int64_t{sizeof(Head)} : 0; }
    int64_t code_bytes() const { return kLanes * kDepth * bits / 8; }  // of one block
    int64_t codes_bytes() const { return code_bytes() << span; }
    int64_t scales_bytes() const { return kLanes * scale_bytes * scales_per_block; }
    int64_t all_scales_bytes() const {
        if (scaling == Scaling::kBytes) return kLanes * ((scales_per_block << span) + 2);
        if (scaling == Scaling::kSixBits) return kLanes * ((3 << span) / 2 + 4);
        if (scaling == Scaling::kFourBits) return kLanes * ((scales_per_block << span) + 4);
        return scales_bytes() * (offsets ? 2 : 1);
    }
    int64_t tile_bytes() const { return codes_bytes() + all_scales_bytes(); }
    // What is subtracted from codes.
    float zero() const { return offsets || table || bits == 8 ? 0.0f : static_cast<float>(1 << (bits - 1)); }
    int64_t tiles(int64_t in) const { return (in / kDepth + (int64_t{1} << span) - 1) >> span; }

    // A block of a group of sixteen outputs. Tiles of `groups` groups alternate.
    struct Block {
        const uint8_t *tile, *codes;
        int64_t within;  // its number in the tile
    };
    Block block(const uint8_t* tiles, int64_t groups, int64_t index) const {
        const int64_t within = index & ((int64_t{1} << span) - 1);
        const uint8_t* tile = tiles + (index >> span) * groups * tile_bytes();
        return {tile, tile + within * code_bytes(), within};
    }
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

// Converts unsigned bytes.
PACELINE_INLINE u16x16 widen_to_words(const uint8_t* from) {
#if defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
    return bits<u16x16>(_mm256_cvtepu8_epi16(read<__m128i>(from)));
#else
    return convert<u16x16>(read<Vector<uint8_t, 16>>(from));
#endif
}
PACELINE_INLINE u32x16 widen_bytes(const uint8_t* from) {
#if defined(PACELINE_AVX512)
    return bits<u32x16>(_mm512_maskz_cvtepu8_epi32(0xffff, read<__m128i>(from)));
#elif defined(PACELINE_AVX2)
    const __m128i all = read<__m128i>(from);
    return {bits<Vector<uint32_t, 8>>(_mm256_cvtepu8_epi32(all)),
            bits<Vector<uint32_t, 8>>(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
#else
    return convert<u32x16>(widen_to_words(from));
#endif
}

// Converts floats of 8 bits (E4M3) in the upper byte of each word. NaN is not supported.
PACELINE_INLINE f32x16 widen_float8(const u16x16& words) {
    // The exponent's bias differs. An exact multiplication corrects it, also for subnormal numbers.
#if defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
    // By way of fp16, because an Intel processor takes over a hundred cycles to multiply numbers that are subnormal in fp32.
    const auto half = bits<Vector<int16_t, 16>>(words) >> static_cast<int16_t>(1);
    return widen_fp16(bits<u16x16>(half) & static_cast<uint16_t>(0xbf80)) * 0x1p8f;
#else
    const u32x16 word = convert<u32x16>(words) << 16;
    return bits<f32x16>(bits<u32x16>(bits<i32x16>(word) >> 4) & 0x87f00000u) * 0x1p120f;
#endif
}

PACELINE_INLINE f32x16 load_scales(const uint8_t* from, const TileLayout& layout) {
    switch (layout.scaling) {
        case Scaling::kHalf: return widen_fp16(read<u16x16>(from));
        case Scaling::kFloat: return read<f32x16>(from);
        case Scaling::kPowers: {
            const u32x16 word = widen_bytes(from) << 23;
            const i32x16 least = splat<i32x16>(0x00400000);  // 2^-127, which is subnormal
            return bits<f32x16>(select(bits<i32x16>(word) > least, bits<i32x16>(word), least));
        }
        default: break;
    }
    const f32x16 scale = widen_float8(widen_to_words(from) << static_cast<uint16_t>(8)) * layout.head->factor;
    return layout.head->divisor == 1.0f ? scale : scale / layout.head->divisor;
}

// Loads the scales and offsets of 6 bits of a tile's block.
PACELINE_INLINE void load_six_bits(const uint8_t* from, const TileLayout& layout, int64_t block, f32x16& scale,
                                   f32x16& offset) {
    const uint8_t *high = from + (kLanes << layout.span), *numbers = high + (kLanes << layout.span) / 2;
    const u32x16 low = widen_bytes(from + block * kLanes);
    const u32x16 more = widen_bytes(high + block / 2 * kLanes) >> static_cast<uint32_t>(block % 2 * 4);
    scale = convert<f32x16>(bits<i32x16>((low & 15) | (more & 3) << 4)) * widen_fp16(read<u16x16>(numbers));
    const u32x16 added = low >> 4 | (more & 12) << 2;
    offset = convert<f32x16>(bits<i32x16>(added)) * widen_fp16(read<u16x16>(numbers + 2 * kLanes));
}

// Loads the scales and offsets of 4 bits of a part of a tile's block.
PACELINE_INLINE void load_four_bits(const uint8_t* from, const TileLayout& layout, int64_t part, f32x16& scale,
                                    f32x16& offset) {
    const uint8_t* numbers = from + (layout.scales_per_block << layout.span) * kLanes;
    const u32x16 both = widen_bytes(from + part * kLanes);
    scale = convert<f32x16>(bits<i32x16>(both & 15)) * widen_fp16(read<u16x16>(numbers));
    offset = convert<f32x16>(bits<i32x16>(both >> 4)) * widen_fp16(read<u16x16>(numbers + 2 * kLanes));
}

// Loads the scales of a part of a tile's block, and its offsets if there are any.
PACELINE_INLINE void load_part(const TileLayout::Block& block, const TileLayout& layout, int64_t part, f32x16& scale,
                               f32x16& offset) {
    const uint8_t* from = block.tile + layout.codes_bytes();
    if (layout.scaling == Scaling::kSixBits) return load_six_bits(from, layout, block.within, scale, offset);
    const int64_t of_tile = block.within * layout.scales_per_block + part;
    if (layout.scaling == Scaling::kFourBits) return load_four_bits(from, layout, of_tile, scale, offset);
    if (layout.scaling == Scaling::kBytes) {
        const uint8_t* numbers = from + (layout.scales_per_block << layout.span) * kLanes;
        const u32x16 own = widen_bytes(from + of_tile * kLanes);
        scale = convert<f32x16>(bits<i32x16>(own << 24) >> 24) * widen_fp16(read<u16x16>(numbers));
        return;
    }
    const uint8_t* scales = from + part * kLanes * layout.scale_bytes;
    scale = load_scales(scales, layout);
    if (layout.offsets) offset = load_scales(scales + layout.scales_bytes(), layout);
}

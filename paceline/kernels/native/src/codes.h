// The numbers that codes of quantized weights stand for, in registers.

// Returns the table's number at the place in the low four bits of each lane. Other bits are zero, or are ignored.
PACELINE_INLINE f32x16 look_up(const u32x16& places, const float* table) {
#if defined(PACELINE_AVX512)
    return bits<f32x16>(_mm512_maskz_permutexvar_ps(0xffff, bits<__m512i>(places), read<__m512>(table)));
#elif defined(PACELINE_AVX2)
    const auto eight = [table](const Vector<uint32_t, 8>& own) PACELINE_INLINED {
        const __m256i place = bits<__m256i>(own);
        const __m256 low = _mm256_permutevar8x32_ps(read<__m256>(table), place);
        const __m256 high = _mm256_permutevar8x32_ps(read<__m256>(table + 8), place);
        // The fourth bit, as a sign, selects the half of the table.
        return bits<f32x8>(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(place, 28))));
    };
    return {eight(places.low), eight(places.high)};
#elif defined(PACELINE_NEON)
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(table);
    const uint8x16x4_t all = {vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)};
    const u32x16 at = places * 0x04040404u + 0x03020100u;  // the places of the bytes of each number
    const auto four = [&all](const Vector<uint32_t, 4>& own) PACELINE_INLINED {
        return bits<Vector<float, 4>>(vqtbl4q_u8(all, bits<uint8x16_t>(own)));
    };
    return {{four(at.low.low), four(at.low.high)}, {four(at.high.low), four(at.high.high)}};
#else
    uint32_t own[kLanes];
    float numbers[kLanes];
    write(own, places);
    for (int64_t i = 0; i < kLanes; ++i) numbers[i] = table[own[i]];
    return load(numbers);
#endif
}

// Sixteen outputs at two places along `in`.
struct TwoPlaces {
    f32x16 first, second;
};

// Converts words of two codes of 16 bits, minus zero. Below 2^23, the last bits of a float are a whole number.
PACELINE_INLINE TwoPlaces numbers_of(const u32x16& codes, float zero) {
    const uint32_t magic = 0x4b000000;  // 2^23
    return {bits<f32x16>((codes & 0xffff) | magic) - (0x1p23f + zero), bits<f32x16>(codes >> 16 | magic) - (0x1p23f + zero)};
}
PACELINE_INLINE TwoPlaces fma(const TwoPlaces& numbers, const f32x16& scale, const f32x16& offset) {
    return {fma(numbers.first, scale, offset), fma(numbers.second, scale, offset)};
}

// The codes of one block for eight values along `in`, in registers. weights(pair): the weights of sixteen outputs for two of
// these values, before they are rounded.
// `Width` bits of each code of a block: 16-bit words [in * Width / 32][out][in % 2], lowest first.
template <int Width>
struct Plane {
    u32x16 words;

    Plane(const uint8_t* codes, int64_t eight)
        : words(read<u32x16>(codes + eight * Width / 4 * 64) >> static_cast<uint32_t>(eight * Width * 4 % 16)) {}
    // The codes of two values as halves of a word.
    u32x16 pair(int index) const { return words >> static_cast<uint32_t>(Width * index) & ((1u << Width) - 1) * 0x10001u; }
};
template <>
struct Plane<0> {
    Plane(const uint8_t*, int64_t) {}
    u32x16 pair(int) const { return u32x16{}; }
};
// Codes of 2 to 6 bits: two or four of their bits, then the others.
template <int Bits>
struct BitPlanes {
    static constexpr int kLow = Bits < 4 ? 2 : 4;
    Plane<kLow> low;
    Plane<Bits - kLow> high;
    float zero;

    BitPlanes(const uint8_t* codes, int64_t eight, const TileLayout& layout)
        : low(codes, eight), high(codes + kLow * 64, eight), zero(layout.zero()) {}
    TwoPlaces weights(int pair, const f32x16& scale, const f32x16& offset) const {
        return fma(numbers_of(low.pair(pair) | high.pair(pair) << kLow, zero), scale, offset);
    }
};
// Bytes of sixteen outputs, [in / 2][out][in % 2].
struct BytePairs {
    const uint8_t* codes;

    BytePairs(const uint8_t* block, int64_t eight, const TileLayout&) : codes(block + eight * 128) {}
    u16x16 pair(int index) const { return read<u16x16>(codes + index * 32); }
};
#ifndef PACELINE_AMX
struct Bytes : BytePairs {
    using BytePairs::BytePairs;
    TwoPlaces weights(int index, const f32x16& scale, const f32x16& offset) const {
        const u32x16 both = convert<u32x16>(pair(index));
        const i32x16 first = bits<i32x16>(both << 24) >> 24, second = bits<i32x16>(both << 16) >> 24;
        return fma(TwoPlaces{convert<f32x16>(first), convert<f32x16>(second)}, scale, offset);
    }
};
#endif
struct TablePlaces {
    u32x16 words;
    const float* table;

    TablePlaces(const uint8_t* codes, int64_t eight, const TileLayout& layout)
        : words(read<u32x16>(codes + eight * 64)), table(layout.head->numbers) {}
    TwoPlaces weights(int pair, const f32x16& scale, const f32x16&) const {
        const auto at = [&](int place) PACELINE_INLINED {
            return look_up(words >> static_cast<uint32_t>(16 * place + 4 * pair) & 15, table) * scale;
        };
        return {at(0), at(1)};
    }
};
struct Float8s : BytePairs {
    using BytePairs::BytePairs;
    TwoPlaces weights(int index, const f32x16& scale, const f32x16&) const {
        const u16x16 both = pair(index);
        // The mask of `widen_float8` removes the other byte.
        return {widen_float8(both << static_cast<uint16_t>(8)) * scale, widen_float8(both) * scale};
    }
};

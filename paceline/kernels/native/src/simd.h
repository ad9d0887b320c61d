// Arithmetic on sixteen fp32 lanes. Included once for each instruction set, inside its namespace.

using f32x16 = Vector<float, 16>;
using i32x16 = Vector<int32_t, 16>;
using u32x16 = Vector<uint32_t, 16>;
using u16x16 = Vector<uint16_t, 16>;
using u16x32 = Vector<uint16_t, 32>;
using f32x8 = Vector<float, 8>;
using f64x8 = Vector<double, 8>;
using i64x8 = Vector<int64_t, 8>;
using u64x8 = Vector<uint64_t, 8>;
typedef uint16_t bf16;

PACELINE_INLINE f32x16 splat(float value) { return splat<f32x16>(value); }

// {0, 1, 2, ...}
template <class V>
PACELINE_INLINE V lane_numbers() {
    constexpr V numbers = make<V>([](int i) { return i; });
    return numbers;
}

PACELINE_INLINE f32x16 widen(u16x16 half) {
    return bits<f32x16>(convert<u32x16>(half) << 16);
}

// Rounds to the nearest, ties to even.
PACELINE_INLINE u16x16 narrow(f32x16 value) {
#if defined(PACELINE_NEON) && defined(PACELINE_BF16_PRODUCTS)
    const auto eight = [](const f32x8& half) PACELINE_INLINED {
        const bfloat16x8_t low = vcvtq_low_bf16_f32(bits<float32x4_t>(half.low));
        return bits<Vector<uint16_t, 8>>(vcvtq_high_bf16_f32(low, bits<float32x4_t>(half.high)));
    };
    return {eight(value.low), eight(value.high)};
#elif defined(PACELINE_BF16_PRODUCTS)
    return bits<u16x16>(_mm512_cvtneps_pbh(bits<__m512>(value)));
#else
    const u32x16 word = bits<u32x16>(value);
    const u32x16 rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    return convert<u16x16>(select(value == value, rounded, splat<u32x16>(0x7fc0)));
#endif
}

PACELINE_INLINE f32x16 load(const float* from) { return read<f32x16>(from); }
PACELINE_INLINE f32x16 load(const bf16* from) { return widen(read<u16x16>(from)); }
PACELINE_INLINE void store(float* to, f32x16 value) { write(to, value); }
PACELINE_INLINE void store(bf16* to, f32x16 value) { write(to, narrow(value)); }

// Load or store the first `count` lanes. Other loaded lanes are 0; other memory is not written.
template <class T>
PACELINE_INLINE f32x16 load_some(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T lanes[kLanes] = {};
    memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}
template <class T>
PACELINE_INLINE void store_some(T* to, f32x16 value, int64_t count) {
    if (count >= kLanes) return store(to, value);
    T lanes[kLanes];
    store(lanes, value);
    memcpy(to, lanes, count * sizeof(T));
}

// Rounds a value to what T can hold.
PACELINE_INLINE f32x16 round_to(const float*, f32x16 value) { return value; }
PACELINE_INLINE f32x16 round_to(const bf16*, f32x16 value) { return widen(narrow(value)); }

// Maps fp32 to integers of the same order. -0 equals 0, and NaN is the largest.
PACELINE_INLINE i32x16 order_of(f32x16 value) {
    const i32x16 word = bits<i32x16>(value + 0.0f), order = word ^ (word >> 31 & 0x7fffffff);
    return select(value == value, order, splat<i32x16>(0x7fffffff));
}

// a * b + c. Fused if the instruction set can, and then always. The compiler is told not to fuse by itself.
template <class V>
PACELINE_INLINE V fma(const V& a, const V& b, const V& c) {
    if constexpr (kIsHalves<V>) {
        return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
    } else {
#if defined(PACELINE_AVX512)
        if constexpr (std::is_same_v<V, f32x16>)
            return bits<V>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
        else
            return bits<V>(_mm512_fmadd_pd(bits<__m512d>(a), bits<__m512d>(b), bits<__m512d>(c)));
#elif defined(PACELINE_AVX2)
        if constexpr (std::is_same_v<V, f32x8>)
            return bits<V>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
        else
            return bits<V>(_mm256_fmadd_pd(bits<__m256d>(a), bits<__m256d>(b), bits<__m256d>(c)));
#elif defined(PACELINE_NEON)
        if constexpr (std::is_same_v<typename Shape<V>::Element, float>)
            return bits<V>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
        else
            return bits<V>(vfmaq_f64(bits<float64x2_t>(c), bits<float64x2_t>(a), bits<float64x2_t>(b)));
#else
        return a * b + c;
#endif
    }
}

#ifdef PACELINE_BF16_PRODUCTS
// c + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] for the bf16 pairs of each lane of a register. On NEON, b is one pair for all
// lanes.
#ifdef PACELINE_NEON
using PairsOfBf16 = Vector<uint32_t, 4>;
using Sums = Vector<float, 4>;
PACELINE_INLINE Sums dot_pairs(PairsOfBf16 a, uint32_t b, Sums c) {
    const bfloat16x4_t pair = bits<bfloat16x4_t>(uint64_t{b});
    return bits<Sums>(vbfdotq_lane_f32(bits<float32x4_t>(c), bits<bfloat16x8_t>(a), pair, 0));
}
#else
PACELINE_INLINE f32x16 dot_pairs(u32x16 a, u32x16 b, f32x16 c) {
    return bits<f32x16>(_mm512_dpbf16_ps(bits<__m512>(c), bits<__m512bh>(a), bits<__m512bh>(b)));
}
#endif
#endif

// 1 / x within 2 ulp, for x >= 1. Four times as fast as a division.
PACELINE_INLINE f32x16 reciprocal(f32x16 x) {
#ifdef PACELINE_AVX512
    const f32x16 guess = bits<f32x16>(_mm512_maskz_rcp14_ps(0xffff, bits<__m512>(x)));
    return guess * fma(-x, guess, splat(2.0f));
#else
    return 1.0f / x;
#endif
}

template <class V>
PACELINE_INLINE V max(V a, V b) {
    return select(a > b, a, b);
}

// The lanes are joined in a fixed order.
PACELINE_INLINE float sum_lanes(f32x16 v) {
    return over_lanes(v, [](const auto& a, const auto& b) { return a + b; });
}
template <class V>
PACELINE_INLINE auto max_lane(V v) {
    return over_lanes(v, [](const auto& a, const auto& b) { return max(a, b); });
}

// 2^x within 2 ulp; 0 below -126 and for -inf; 2^127 above 127.
PACELINE_INLINE f32x16 exp2(f32x16 x) {
    const f32x16 capped = select(x > 127.0f, splat(127.0f), x);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
    const f32x16 shifted = capped + magic, rest = capped - (shifted - magic);
    // The polynomial with the least relative error for |rest| <= 1/2.
    f32x16 p = splat(0.0001535335904918611f);
    p = fma(p, rest, splat(0.0013398879673331976f));
    p = fma(p, rest, splat(0.009618437848985195f));
    p = fma(p, rest, splat(0.055503323674201965f));
    p = fma(p, rest, splat(0.24022647738456726f));
    p = fma(p, rest, splat(0.6931471824645996f));
    p = fma(p, rest, splat(1.0f));
    const f32x16 power = bits<f32x16>(bits<u32x16>(p) + (bits<u32x16>(shifted) << 23));
    return select(x < -126.0f, f32x16{}, power);
}

constexpr float kLog2E = 1.44269504f;

// e^x, as exact as x * log2(e) is in fp32.
PACELINE_INLINE f32x16 exp(f32x16 x) { return exp2(x * kLog2E); }

#ifdef PACELINE_AMX
// Gathers four floats each from four places.
PACELINE_INLINE f32x16 gather_fours(const float* a, const float* b, const float* c, const float* d) {
    __m512 all = _mm512_castps128_ps512(_mm_loadu_ps(a));
    all = _mm512_insertf32x4(all, _mm_loadu_ps(b), 1);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(c), 2);
    return bits<f32x16>(_mm512_insertf32x4(all, _mm_loadu_ps(d), 3));
}

// Takes the first four columns of a 16 x 16 square whose rows are `stride` apart.
PACELINE_INLINE void take_columns(const float* square, int64_t stride, f32x16 (&columns)[4]) {
    f32x16 parts[4];  // rows i, 4 + i, 8 + i and 12 + i
    for (int i = 0; i < 4; ++i) {
        const float* row = square + i * stride;
        parts[i] = gather_fours(row, row + 4 * stride, row + 8 * stride, row + 12 * stride);
    }
    constexpr i32x16 words = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    constexpr i32x16 pairs = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    for (int i = 0; i < 2; ++i) {
        const f32x16 upper = __builtin_shuffle(parts[0], parts[1], words + 2 * i);
        const f32x16 lower = __builtin_shuffle(parts[2], parts[3], words + 2 * i);
        columns[2 * i] = __builtin_shuffle(upper, lower, pairs);
        columns[2 * i + 1] = __builtin_shuffle(upper, lower, pairs + 2);
    }
}
#endif

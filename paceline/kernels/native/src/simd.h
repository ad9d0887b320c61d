// Vectors of sixteen fp32 lanes for any machine: the compiler splits them if registers are shorter. Included once for
// each instruction set, inside its namespace.

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint16_t bf16;

template <class To, class From>
static inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

template <class V, class T>
static inline V read(const T* from) {
    V value;
    memcpy(&value, from, sizeof(value));
    return value;
}

static inline f32x16 splat(float value) { return value - f32x16{}; }

static inline f32x16 widen(u16x16 half) {
#ifdef PACELINE_AVX512
    // GCC 12 makes three instructions of the conversion below.
    const u32x16 word = bits<u32x16>(_mm512_maskz_cvtepu16_epi32(0xffff, bits<__m256i>(half)));
#else
    const u32x16 word = __builtin_convertvector(half, u32x16);
#endif
    return bits<f32x16>(word << 16);
}

// Rounds to the nearest, ties to even.
static inline u16x16 narrow(f32x16 value) {
#ifdef PACELINE_AVX512
    return bits<u16x16>(_mm512_cvtneps_pbh(bits<__m512>(value)));
#else
    const u32x16 word = bits<u32x16>(value);
    const u32x16 rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    return __builtin_convertvector(value == value ? rounded : 0x7fc0 + u32x16{}, u16x16);
#endif
}

static inline f32x16 load(const float* from) { return read<f32x16>(from); }
static inline f32x16 load(const bf16* from) { return widen(read<u16x16>(from)); }
static inline void store(float* to, f32x16 value) { memcpy(to, &value, sizeof(value)); }
static inline void store(bf16* to, f32x16 value) {
    const u16x16 half = narrow(value);
    memcpy(to, &half, sizeof(half));
}

// Load or store the first `count` lanes. Other loaded lanes are 0; other memory is not written.
template <class T>
static inline f32x16 load_some(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T lanes[kLanes] = {};
    memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}
template <class T>
static inline void store_some(T* to, f32x16 value, int64_t count) {
    if (count >= kLanes) return store(to, value);
    T lanes[kLanes];
    store(lanes, value);
    memcpy(to, lanes, count * sizeof(T));
}

// Rounds a value to what T can hold.
static inline f32x16 round_to(const float*, f32x16 value) { return value; }
static inline f32x16 round_to(const bf16*, f32x16 value) { return widen(narrow(value)); }

// Maps fp32 to integers of the same order. -0 equals 0, and NaN is the largest.
static inline i32x16 order_of(f32x16 value) {
    const i32x16 word = bits<i32x16>(value + 0.0f), order = word ^ (word >> 31 & 0x7fffffff);
    return value == value ? order : 0x7fffffff + i32x16{};
}

// Fused if the instruction set can, and then always. The compiler is told not to fuse by itself.
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#ifdef PACELINE_AVX512
    return bits<f32x16>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#else
    return a * b + c;
#endif
}

static inline f64x8 fma(f64x8 a, f64x8 b, f64x8 c) {
#ifdef PACELINE_AVX512
    return bits<f64x8>(_mm512_fmadd_pd(bits<__m512d>(a), bits<__m512d>(b), bits<__m512d>(c)));
#else
    return a * b + c;
#endif
}

// c + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] for the bf16 pairs of each lane.
static inline f32x16 dot_pairs(u32x16 a, u32x16 b, f32x16 c) {
#ifdef PACELINE_AVX512
    return bits<f32x16>(_mm512_dpbf16_ps(bits<__m512>(c), bits<__m512bh>(a), bits<__m512bh>(b)));
#else
    c = fma(bits<f32x16>(a << 16), bits<f32x16>(b << 16), c);
    return fma(bits<f32x16>(a & 0xffff0000u), bits<f32x16>(b & 0xffff0000u), c);
#endif
}

// 1 / x within 2 ulp, for x >= 1. Four times as fast as a division.
static inline f32x16 reciprocal(f32x16 x) {
#ifdef PACELINE_AVX512
    const f32x16 guess = bits<f32x16>(_mm512_maskz_rcp14_ps(0xffff, bits<__m512>(x)));
    return guess * fma(-x, guess, splat(2.0f));
#else
    return 1.0f / x;
#endif
}

template <class V>
static inline V max(V a, V b) {
    return a > b ? a : b;
}

// Joins all lanes in a fixed order.
template <class V, class Join>
static inline auto over_lanes(V v, const Join& join) {
    v = join(v, __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = join(v, __builtin_shuffle(v, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = join(v, __builtin_shuffle(v, i32x16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = join(v, __builtin_shuffle(v, i32x16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}
static inline float sum_lanes(f32x16 v) {
    return over_lanes(v, [](f32x16 a, f32x16 b) { return a + b; });
}
template <class V>
static inline auto max_lane(V v) {
    return over_lanes(v, max<V>);
}

// 2^x within 2 ulp; 0 below -126 and for -inf; 2^127 above 127.
static inline f32x16 exp2(f32x16 x) {
    const f32x16 capped = x > 127.0f ? splat(127.0f) : x;
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
    return x < -126.0f ? f32x16{} : power;
}

constexpr float kLog2E = 1.44269504f;

// e^x, as exact as x * log2(e) is in fp32.
static inline f32x16 exp(f32x16 x) { return exp2(x * kLog2E); }

// Transposes 16 x 16 words.
static inline void transpose(u32x16 (&rows)[kLanes]) {
    // Each round swaps off-diagonal squares: first single words, then squares of 2, 4 and 8.
#define PACELINE_SWAP(SIZE, LOW, HIGH)                                             \
    for (int i = 0; i < kLanes; ++i) {                                             \
        if (i & SIZE) continue;                                                    \
        const u32x16 a = rows[i], b = rows[i + SIZE];                              \
        rows[i] = __builtin_shuffle(a, b, LOW);                                    \
        rows[i + SIZE] = __builtin_shuffle(a, b, HIGH);                            \
    }
    constexpr u32x16 low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    constexpr u32x16 low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    constexpr u32x16 low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    constexpr u32x16 low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    PACELINE_SWAP(1, low1, low1 + 1)
    PACELINE_SWAP(2, low2, low2 + 2)
    PACELINE_SWAP(4, low4, low4 + 4)
    PACELINE_SWAP(8, low8, low8 + 8)
#undef PACELINE_SWAP
}

// Gathers four floats each from four places.
static inline f32x16 gather_fours(const float* a, const float* b, const float* c, const float* d) {
#ifdef PACELINE_AVX512
    __m512 all = _mm512_castps128_ps512(_mm_loadu_ps(a));
    all = _mm512_insertf32x4(all, _mm_loadu_ps(b), 1);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(c), 2);
    return bits<f32x16>(_mm512_insertf32x4(all, _mm_loadu_ps(d), 3));
#else
    float all[kLanes];
    const float* from[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) memcpy(all + 4 * i, from[i], 4 * sizeof(float));
    return load(all);
#endif
}

// Takes the first four columns of a 16 x 16 square whose rows are `stride` apart.
static inline void take_columns(const float* square, int64_t stride, f32x16 (&columns)[4]) {
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

// Sixteen lanes of fp32, whatever the machine has: the compiler splits them. Included once for each instruction set,
// inside its namespace.

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
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

static inline f32x16 widen(u16x16 half) { return bits<f32x16>(__builtin_convertvector(half, u32x16) << 16); }

// To the nearest, ties to even.
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

// The first `count` lanes; the others are 0, or left alone.
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

// What T can hold of a value.
static inline f32x16 round_to(const float*, f32x16 value) { return value; }
static inline f32x16 round_to(const bf16*, f32x16 value) { return widen(narrow(value)); }

// Fused where the machine can, and always in the same way: the compiler is told not to fuse by itself.
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#ifdef PACELINE_AVX512
    return bits<f32x16>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
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

static inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Over all lanes, in a fixed order.
static inline float sum_lanes(f32x16 v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}
static inline float max_lane(f32x16 v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

// e^x within 2 ulp; 0 below -87, which is -inf's case too; e^88 above 88.
static inline f32x16 exp(f32x16 x) {
    const f32x16 capped = x > 88.0f ? splat(88.0f) : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 turns = fma(capped, splat(1.44269504f), splat(magic)) - magic;
    f32x16 rest = fma(turns, splat(-0.693359375f), capped);
    rest = fma(turns, splat(2.12194440e-4f), rest);
    // Taylor's series up to rest^7 / 7!, |rest| <= ln(2) / 2.
    f32x16 p = splat(1.0f / 5040);
    p = fma(p, rest, splat(1.0f / 720));
    p = fma(p, rest, splat(1.0f / 120));
    p = fma(p, rest, splat(1.0f / 24));
    p = fma(p, rest, splat(1.0f / 6));
    p = fma(p, rest, splat(0.5f));
    p = fma(p, rest, splat(1.0f));
    p = fma(p, rest, splat(1.0f));
    const i32x16 exponent = bits<i32x16>(turns + magic) - bits<i32x16>(splat(magic));
    const f32x16 power = bits<f32x16>((exponent + 127) << 23);
    return x < -87.0f ? f32x16{} : p * power;
}

// Transposes 16 x 16 words.
static inline void transpose(u32x16 (&rows)[kLanes]) {
    // Each round swaps off-diagonal squares of half the size: first single words, then squares of 2, 4 and 8.
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

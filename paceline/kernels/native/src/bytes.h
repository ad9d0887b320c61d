// Products with weights of 8 bits in which x becomes signed bytes, too (W8A8). Sums are whole numbers of 32 bits, so they are
// exact, and are the same for any order and any instruction. What follows is in fp32, in one order. So all instruction sets
// give the same bits.
//
// Weights are pairs of bytes in the layout of packed bf16 weights: [out / 16][in / 4][16][4] bytes. Instructions that multiply
// and add four bytes at once use FusedBytes, others PlainBytes.

#if defined(PACELINE_AMX) || (defined(PACELINE_NEON) && defined(PACELINE_BF16_PRODUCTS))
constexpr bool kHasFusedBytes = true, kHasPlainBytes = false;
#elif defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
constexpr bool kHasFusedBytes = true, kHasPlainBytes = true;  // the processor decides
#else
constexpr bool kHasFusedBytes = false, kHasPlainBytes = true;
#endif

// VNNI multiplies unsigned bytes of x, which are 128 more than their values, by signed bytes of weights.
#if defined(PACELINE_INTEGER_PRODUCTS)
constexpr bool kUnsignedBytes = true;
#else
constexpr bool kUnsignedBytes = false;
#endif

template <>
struct LeftOf<FusedBytes> {
    using Type = FusedBytes;
};
// Two values of x for plain products.
struct ShortPair {
    int16_t pair[2];
};
template <>
struct LeftOf<PlainBytes> {
    using Type = ShortPair;
};

// Returns whether this processor multiplies and adds four bytes in one instruction. The result is the same.
static inline bool fuses_bytes() {
#if defined(PACELINE_AVX512) && !defined(PACELINE_AMX)
    return __builtin_cpu_supports("avx512vnni");
#elif defined(PACELINE_AVX2)
    return __builtin_cpu_supports("avxvnni");
#else
    return kHasFusedBytes;
#endif
}

using WholeSums = Vector<int32_t, kRegisterLanes>;

#if defined(PACELINE_INTEGER_PRODUCTS)
#ifdef PACELINE_AVX512
#define PACELINE_VEX ""
#else
#define PACELINE_VEX "%{vex%} "  // the instruction of AVX-VNNI, not the one of AVX-512
#endif
// As in `Products<float>`, the compiler must keep the order.
PACELINE_INLINE Words repeat_word(const void* x) {
    Words repeated;
    asm volatile("vpbroadcastd %1, %0" : "=v"(repeated) : "m"(*static_cast<const int32_t*>(x)));
    return repeated;
}
template <>
struct Products<FusedBytes> {
    static constexpr int kValues = 2, kTurns = 1;
    static constexpr int64_t kPart = 2 * kRegisterLanes;
    static Words weights(const FusedBytes* w, int) { return read<Words>(w); }
    static Words repeat(const FusedBytes* x, int) { return repeat_word(x); }
    static void add(const Words& x, const Words& weights, Floats& sum) {
        asm volatile(PACELINE_VEX "vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weights));
    }
};
// One turn multiplies the bytes at even places, another one those at odd places.
template <>
struct Products<PlainBytes> {
    static constexpr int kValues = 2, kTurns = 2;
    static constexpr int64_t kPart = 2 * kRegisterLanes;
    using Shorts = Vector<int16_t, 2 * kRegisterLanes>;
    static Shorts weights(const PlainBytes* w, int turn) {
        const auto bytes = read<Vector<uint16_t, 2 * kRegisterLanes>>(w);
        const auto upper = turn ? bytes : bytes << static_cast<uint16_t>(8);
        return bits<Shorts>(upper) >> static_cast<int16_t>(8);
    }
    static Words repeat(const ShortPair* x, int turn) { return repeat_word(x + turn); }
    static void add(const Words& x, const Shorts& weights, Floats& sum) {
        Words product;
        asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(x), "v"(weights));
    }
};
#elif defined(PACELINE_NEON) && defined(PACELINE_BF16_PRODUCTS)
template <>
struct Products<FusedBytes> {
    static constexpr int kValues = 2, kTurns = 1;
    static constexpr int64_t kPart = 2 * kRegisterLanes;
    static Words weights(const FusedBytes* w, int) { return read<Words>(w); }
    static uint32_t repeat(const FusedBytes* x, int) { return read<uint32_t>(x); }
    static void add(uint32_t x, const Words& weights, Floats& sum) {
        const int8x8_t four = bits<int8x8_t>(uint64_t{x});
        sum = bits<Floats>(vdotq_lane_s32(bits<int32x4_t>(sum), bits<int8x16_t>(weights), four, 0));
    }
};
#elif !defined(PACELINE_AMX)
// One turn for each of four bytes.
template <>
struct Products<PlainBytes> {
    static constexpr int kValues = 2, kTurns = 4;
    static constexpr int64_t kPart = 2 * kRegisterLanes;
    static WholeSums weights(const PlainBytes* w, int turn) {
        return bits<WholeSums>(read<Words>(w) << static_cast<uint32_t>(24 - 8 * turn)) >> 24;
    }
    static WholeSums repeat(const ShortPair* x, int turn) { return splat<WholeSums>(x[turn / 2].pair[turn % 2]); }
    static void add(const WholeSums& x, const WholeSums& weights, Floats& sum) {
        sum = bits<Floats>(bits<WholeSums>(sum) + x * weights);
    }
};
#endif

// Stores sixteen whole numbers as x of a product.
PACELINE_INLINE void store_bytes(FusedBytes* to, const i32x16& values) {
    write(to, convert<Vector<int8_t, kLanes>>(kUnsignedBytes ? values + 128 : values));
}
PACELINE_INLINE void store_bytes(ShortPair* to, const i32x16& values) {
    int16_t shorts[kLanes];
    write(shorts, convert<Vector<int16_t, kLanes>>(values));
    for (int i = 0; i < kLanes / 2; ++i)
        for (int j = 0; j < 2; ++j)
            // With vectors of pairs, the values at even places of four come first.
            to[i].pair[j] = shorts[kUnsignedBytes ? i / 2 * 4 + j * 2 + i % 2 : i * 2 + j];
}

// Rows of x as bytes, each with a scale.
template <class B>
struct ByteInput : Input<B> {
    const float* scales;
};

// Rounds `count` values of a row and returns their scale. fixed: the scale; 0: the one with which the largest value is 127.
// A value that is not finite makes the scale NaN, and so all results.
template <class T, class X>
static float round_to_bytes(const T* x, int64_t count, int64_t bytes, float fixed, X* to) {
    f32x16 largest = {}, nan_if_not_finite = {};
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 value = load_some(x + i, count - i);
        largest = max(largest, bits<f32x16>(bits<u32x16>(value) & 0x7fffffffu));
        nan_if_not_finite += value * 0.0f;
    }
    const float most_of_row = max_lane(largest), not_finite = sum_lanes(nan_if_not_finite);
    // The reciprocal of smaller numbers is not finite, so they count as zeros.
    const float factor = most_of_row >= 0x1p-100f ? 127.0f / most_of_row : 0.0f;
    for (int64_t i = 0; i < bytes; i += kLanes) {
        f32x16 value = i < count ? load_some(x + i, count - i) : f32x16{};
        value = fixed == 0.0f ? value * factor : value / splat(fixed);
        value = max(-max(-value, splat(-127.0f)), splat(-128.0f));
        // The sum with this number has no bits for fractions, so it is rounded to the nearest integer.
        store_bytes(to + i / 2, bits<i32x16>(value + 0x1.8p23f) - 0x4b400000);
    }
    return (fixed == 0.0f ? most_of_row / 127.0f : fixed) + not_finite;
}

// A matrix [outputs, in] of bytes with a scale for each output. After its head come the bytes, then for each sixteen outputs
// their scales, and 128 times the sums of their weights.
template <class T, class B>
struct Bytewise {
    static constexpr int64_t kMostOut = kTaskOut;  // outputs of one task
    struct Sixteen {
        float scales[kLanes];
        int32_t excess[kLanes];
    };

    const B* weights;
    const Sixteen* sixteens;
    int64_t outputs, in;  // in: pairs of bytes

    static int64_t depth(int64_t in) { return round_up(in, 2 * kDepth) / 2; }
    static Bytewise of(const void* data, const Op& op) {
        const auto* bytes = static_cast<const char*>(data) + sizeof(Head);
        const int64_t in = depth(op.n0);
        return {reinterpret_cast<const B*>(bytes),
                reinterpret_cast<const Sixteen*>(bytes + round_up(op.n1, kLanes) * in * sizeof(B)), op.n1, in};
    }
    static Columns columns(const Op&) { return {}; }

    static ByteInput<B> input(const Op& op, const Step& step, Team& team, const Columns&) {
        using X = Left<B>;
        const int64_t rows = op.rows * step.tokens, count = op.n0, stride = op.n2, in = depth(count);
        X* memory = static_cast<X*>(team.shared(rows * (in * sizeof(X) + sizeof(float))));
        float* scales = reinterpret_cast<float*>(memory + rows * in);
        const T* x = static_cast<const T*>(op.a);
        const float fixed = static_cast<const Head*>(op.b)->factor;
        for_each_row(team, rows, 2 * in, [&](int64_t row) {
            scales[row] = round_to_bytes(x + row * stride, count, 2 * in, fixed, memory + row * in);
        });
        return {{Chunks(rows, in * sizeof(X)), memory, nullptr, in, in}, scales};
    }

    // Returns packed weights of the sixteen outputs from `first` on, in fp32 [in][16].
    const float* sixteen(int64_t first, int64_t, Worker& worker) const {
        float* packed = static_cast<float*>(worker.scratch.take(2 * kLanes * in * sizeof(float)));
        const int8_t* from = weights[first * in].pair;
        for (int64_t k = 0; k < 2 * in; ++k)
            for (int64_t lane = 0; lane < kLanes; ++lane)
                packed[k * kLanes + lane] = from[k / 4 * 64 + lane * 4 + k % 4] * sixteens[first / kLanes].scales[lane];
        return packed;
    }

    // Calls finish(row, sums) for the rows of a chunk and up to kTaskOut outputs, in order.
    template <class Finish>
    static void multiply_slices(const ByteInput<B>& input, Worker& worker, int64_t chunk, const Slice<Bytewise>* slices,
                                int64_t count, const Finish& finish) {
        Panel<B> panels[kTaskOut / kOutBlock];
        for (int64_t i = 0; i < count; ++i) {
            const Bytewise& own = *slices[i].matrix;
            const int64_t first = slices[i].first, width = slices[count - 1].first + kOutBlock - slices[0].first;
            const B* next = first + width < own.outputs ? own.weights + (first + width) * own.in : nullptr;
            panels[i] = {own.weights + first * own.in, reinterpret_cast<const char*>(next),
                         own.outputs - first > kLanes ? 2 : 1, true};
        }
        input.multiply_chunk(worker, chunk, panels, count, [&](int64_t row, const float* sums) {
            alignas(64) float values[kTaskOut];
            for (int64_t i = 0; i < count; ++i)
                for (int64_t group = 0; group < panels[i].groups; ++group) {
                    const int64_t place = i * kOutBlock + group * kLanes;
                    const Sixteen& own = slices[i].matrix->sixteens[slices[i].first / kLanes + group];
                    i32x16 sum = read<i32x16>(sums + place);
                    if (kUnsignedBytes && std::is_same_v<B, FusedBytes>) sum = sum - read<i32x16>(own.excess);
                    store(values + place, convert<f32x16>(sum) * load(own.scales) * input.scales[row]);
                }
            finish(row, values);
        });
    }
};

// The matrix product of linear layers and attention. Each output adds up along `in` in the same order for any number of
// rows.

constexpr int64_t kRowBlock = 32;  // rows and outputs of one block
constexpr int64_t kOutBlock = 32;

template <class T>
constexpr int64_t padded(int64_t in) {
    return padded_in(sizeof(T) == sizeof(bf16) ? kBf16 : kFp32, in);
}

// The type of x in products with weights of type T. Machines without products of bf16 multiply in fp32, which holds
// every number of bf16. They widen x once, and weights in registers.
template <class T>
struct LeftOf {
#ifdef PACELINE_BF16_PRODUCTS
    using Type = T;
#else
    using Type = float;
#endif
};
template <class T>
using Left = typename LeftOf<T>::Type;

// Rows whose sums are in registers at once: the most for one group of sixteen outputs, and for two.
#if defined(PACELINE_NEON)
constexpr int64_t kMostRows = 6, kMostRowsOfTwo = 2;
#elif defined(PACELINE_BF16_PRODUCTS)
constexpr int64_t kMostRows = 8, kMostRowsOfTwo = 8;
#elif defined(PACELINE_AVX512)
constexpr int64_t kMostRows = 12, kMostRowsOfTwo = 12;
#elif defined(PACELINE_AVX2)
constexpr int64_t kMostRows = 6, kMostRowsOfTwo = 3;
#else
constexpr int64_t kMostRows = 2, kMostRowsOfTwo = 1;
#endif

// Sums are in registers, so the products below work on vectors of a register's length.
constexpr int kRegisterLanes = kRegisterBytes / 4, kParts = kLanes / kRegisterLanes;
using Floats = Vector<float, kRegisterLanes>;
using Words = Vector<uint32_t, kRegisterLanes>;

// Pairs of whole numbers of 8 bits; see bytes.h. Sums of their products are whole numbers, in the place of floats.
struct FusedBytes {
    int8_t pair[2];
};
struct PlainBytes {
    int8_t pair[2];
};
template <class T>
constexpr bool kIsBytes = std::is_same_v<T, FusedBytes> || std::is_same_v<T, PlainBytes>;

// A vector of weights has kValues values along `in` for each output. They are multiplied in kTurns turns, in order, by
// values of x that are repeated in a vector. Vectors of neighbouring outputs are kPart elements apart.
template <class T>
struct Products;
template <>
struct Products<float> {
    static constexpr int kValues = 1, kTurns = 1;
    static constexpr int64_t kPart = kRegisterLanes;
    static Floats weights(const float* w, int) { return read<Floats>(w); }
#if defined(PACELINE_AVX2)
    // The compiler must keep this order. Otherwise it reads all rows of x first, and has no registers left for sums.
    static Floats repeat(const float* x, int turn) {
        Floats repeated;
        asm volatile("vbroadcastss %1, %0" : "=x"(repeated) : "m"(x[turn]));
        return repeated;
    }
    static void add(const Floats& x, const Floats& weights, Floats& sum) {
        asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(weights));
    }
#else
    static Floats repeat(const float* x, int turn) { return splat<Floats>(x[turn]); }
    static void add(const Floats& x, const Floats& weights, Floats& sum) { sum = fma(x, weights, sum); }
#endif
};
#ifdef PACELINE_BF16_PRODUCTS
template <>
struct Products<bf16> {
    static constexpr int kValues = 2, kTurns = 1;
    static constexpr int64_t kPart = 2 * kRegisterLanes;
    static Words weights(const bf16* w, int) { return read<Words>(w); }
#ifdef PACELINE_NEON
    static uint32_t repeat(const bf16* x, int) { return read<uint32_t>(x); }
#else
    static Words repeat(const bf16* x, int) { return splat<Words>(read<uint32_t>(x)); }
#endif
    static void add(const decltype(repeat(nullptr, 0))& x, const Words& weights, Floats& sum) {
        sum = dot_pairs(weights, x, sum);
    }
};
#else
template <>
struct Products<bf16> : Products<float> {
    static constexpr int kValues = 2, kTurns = 2;
    static constexpr int64_t kPart = 2 * kRegisterLanes;
    static Floats weights(const bf16* w, int turn) {
        const Words pairs = read<Words>(w);
        if (turn == 0) return bits<Floats>(pairs << 16);
#if defined(PACELINE_AVX2)
        // The mask must stay in memory, because the sums of six rows need its register.
        alignas(kRegisterBytes) static constexpr Words upper = make<Words>([](int) { return 0xffff0000u; });
        Words masked;
        asm("vpand %2, %1, %0" : "=x"(masked) : "x"(pairs), "m"(upper));
        return bits<Floats>(masked);
#else
        return bits<Floats>(pairs & 0xffff0000u);
#endif
    }
};
#endif

// Options of a product. add: continue from the sums in `out`. lines, ahead: if tiles compute, prefetch this many cache
// lines from `ahead` on for each kDepth of `in`. comes_from_memory: the weights are read from memory, so prefetch those
// that come next; tiles do so if `lines` is 0.
struct Extra {
    bool add = false;
    int64_t lines = 0;
    const char* ahead = nullptr;
    bool comes_from_memory = false;
};

// Distance in bytes by which vectors and tiles prefetch weights. With two groups, the weights that come after the first
// group's end lie after the second group.
constexpr int64_t kAheadOfVectors = 4096, kAheadOfTiles = 2048;

// The weights that vectors prefetch while they multiply a part of the rows. There is one cache line for each turn of the
// loop along `in`. If several parts of the rows pass over the same weights, each prefetches its share of the next ones,
// so that memory never waits for computing.
struct Ahead {
    const char* at;
    int64_t step;        // bytes for each turn of the loop
    int64_t turn, jump;  // `at` moves by `jump` bytes before this turn
    static constexpr int64_t kLine = 64;

    template <int Groups, class T>
    static Ahead of(const T* w, int64_t w_stride, int64_t in, int64_t part, int64_t parts) {
        const auto* own = reinterpret_cast<const char*>(w);
        const int64_t group = w_stride * sizeof(T), turns = in * kLanes * sizeof(T) / kLine;
        if (parts == 1)
            return {own + kAheadOfVectors, kLine, most(0, turns - kAheadOfVectors / kLine), (Groups - 1) * group};
        return {own + Groups * group + part * turns * kLine / parts, kLine / parts, -1, 0};
    }
};

template <int Rows, int Groups, bool Prefetches, class T>
static inline void multiply_few(
    const Left<T>* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t in, float* out, int64_t out_stride,
    bool add, Ahead ahead) {
    using Own = Products<T>;
    static_assert(!Prefetches || Own::kValues * kLanes * sizeof(T) == Ahead::kLine, "a turn takes one line");
    constexpr int parts = Groups * kParts;
    Floats sums[Rows * parts];
    const auto place = [=](int i) { return out + i / parts * out_stride + i % parts * kRegisterLanes; };
    unrolled<Rows * parts>([&](int i) PACELINE_INLINED {
        sums[i] = add ? read<Floats>(place(i)) : Floats{};
    });
    for (int64_t k = 0; k < in; k += Own::kValues) {
        if (Prefetches) {
            if (k == ahead.turn * Own::kValues) ahead.at += ahead.jump;
            for (int group = 0; group < Groups; ++group)
                __builtin_prefetch(ahead.at + group * w_stride * sizeof(T));
            ahead.at += ahead.step;
        }
        unrolled<Own::kTurns>([&](int turn) PACELINE_INLINED {
            decltype(Own::weights(w, 0)) weights[parts];
            unrolled<parts>([&](int part) PACELINE_INLINED {
                const T* from = w + part / kParts * w_stride + k * kLanes + part % kParts * Own::kPart;
                weights[part] = Own::weights(from, turn);
            });
            unrolled<Rows>([&](int row) PACELINE_INLINED {
                const auto repeated = Own::repeat(x + row * x_stride + k, turn);
                unrolled<parts>([&](int part) PACELINE_INLINED {
                    Own::add(repeated, weights[part], sums[row * parts + part]);
                });
#ifdef PACELINE_NEON
                // Otherwise the compiler reads all rows of x first. Products read the row's number as an element of a
                // register, so only the order of rows is fixed.
                asm volatile("" : "+w"(sums[row * parts + parts - 1]));
#endif
            });
        });
    }
    unrolled<Rows * parts>([&](int i) PACELINE_INLINED { write(place(i), sums[i]); });
}

// Cuts rows into parts of at most `Most`, and calls run(count, first) for each, with the number of its rows as a constant.
// Parts of about equal height keep more units busy than full ones and a low last one.
template <int64_t Most, class Run>
PACELINE_INLINE void by_parts(int64_t rows, const Run& run) {
    const int64_t parts = (rows + Most - 1) / Most;
    for (int64_t part = 0, first = 0, height; part < parts; ++part, first += height) {
        height = (rows - first + parts - part - 1) / (parts - part);
        switch (height) {
#define PACELINE_ROWS(N)                                                        \
    case N:                                                                     \
        if constexpr (N <= Most) run(std::integral_constant<int, N>{}, first);  \
        break;
            PACELINE_ROWS(1) PACELINE_ROWS(2) PACELINE_ROWS(3) PACELINE_ROWS(4) PACELINE_ROWS(5) PACELINE_ROWS(6)
            PACELINE_ROWS(7) PACELINE_ROWS(8) PACELINE_ROWS(9) PACELINE_ROWS(10) PACELINE_ROWS(11) PACELINE_ROWS(12)
#undef PACELINE_ROWS
        }
    }
}

template <int Groups, class T>
static inline void multiply_lanes(
    const Left<T>* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t in, int64_t rows, float* out,
    int64_t out_stride, const Extra& extra) {
    constexpr int64_t full = Groups == 1 ? kMostRows : kMostRowsOfTwo;
    const int64_t parts = (rows + full - 1) / full;
    int64_t part = 0;
    by_parts<full>(rows, [&](auto count, int64_t row) {
        constexpr int height = decltype(count)::value;
        const auto few = extra.comes_from_memory ? multiply_few<height, Groups, true, T>
                                                 : multiply_few<height, Groups, false, T>;
        few(x + row * x_stride, x_stride, w, w_stride, in, out + row * out_stride, out_stride, extra.add,
            Ahead::of<Groups>(w, w_stride, in, part++, parts));
    });
}

// out[rows, 16 * groups] = x[rows, in] * w, in fp32.
//   rows: up to kRowBlock; groups: 1 or 2, with weights w_stride apart; in: for bf16 a multiple of kDepth.
template <class T>
static inline void multiply(
    Worker&, const Left<T>* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t in, int64_t rows,
    int64_t groups, float* out, int64_t out_stride, const Extra& extra = {}) {
    if (groups == 2 && (rows <= kMostRowsOfTwo || kMostRows == kMostRowsOfTwo))
        return multiply_lanes<2>(x, x_stride, w, w_stride, in, rows, out, out_stride, extra);
    for (int64_t group = 0; group < groups; ++group)
        multiply_lanes<1>(x, x_stride, w + group * w_stride, w_stride, in, rows, out + group * kLanes, out_stride,
                          extra);
}

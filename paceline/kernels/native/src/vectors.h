// Vectors of any length for any machine. A vector that fits a register is the compiler's own. A longer one is a pair of
// halves, because the compiler would keep its own longer vectors in memory. Included once for each instruction set,
// inside its namespace.

// Vectors must stay in registers, so functions on vectors are always inlined.
#define PACELINE_INLINED __attribute__((always_inline))
#define PACELINE_INLINE static inline PACELINE_INLINED

#if defined(PACELINE_AVX512)
constexpr int kRegisterBytes = 64, kRegisters = 32;
#elif defined(PACELINE_AVX2)
constexpr int kRegisterBytes = 32, kRegisters = 16;
#elif defined(PACELINE_NEON)
constexpr int kRegisterBytes = 16, kRegisters = 32;
#else
constexpr int kRegisterBytes = 16, kRegisters = 16;
#endif

// Calls body(0), body(1), ... with constants, so that elements of a local array can stay in registers.
template <class Body, int... I>
PACELINE_INLINE void unrolled_over(const Body& body, std::integer_sequence<int, I...>) {
    (body(I), ...);
}
template <int N, class Body>
PACELINE_INLINE void unrolled(const Body& body) {
    unrolled_over(body, std::make_integer_sequence<int, N>{});
}

template <class E, int N>
struct Halves;

template <class E, int N, bool Fits>
struct VectorOf {
    typedef E Type __attribute__((vector_size(N * sizeof(E))));
};
template <class E, int N>
struct VectorOf<E, N, false> {
    using Type = Halves<E, N>;
};
template <class E, int N>
using Vector = typename VectorOf<E, N, int(N * sizeof(E)) <= kRegisterBytes>::Type;

// The element type and length of a vector, and the types of its halves and of its comparisons.
template <int Bytes> struct SignedOf;
template <> struct SignedOf<2> { using Type = int16_t; };
template <> struct SignedOf<4> { using Type = int32_t; };
template <> struct SignedOf<8> { using Type = int64_t; };
template <class V>
struct Shape {
    using Element = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
    static constexpr int kCount = sizeof(V) / sizeof(Element);
    using Half = Vector<Element, kCount / 2>;
};
// Places in a vector, for shuffles.
template <class V>
using Indexes = Vector<typename SignedOf<sizeof(typename Shape<V>::Element)>::Type, Shape<V>::kCount>;
template <class V>
constexpr bool kIsHalves = false;
template <class E, int N>
constexpr bool kIsHalves<Halves<E, N>> = true;

template <class E, int N>
struct Halves {
    using Half = Vector<E, N / 2>;
    using Mask = Vector<typename SignedOf<sizeof(E)>::Type, N>;
    Half low, high;

    E operator[](int64_t i) const { return i < N / 2 ? low[i] : high[i - N / 2]; }

#define PACELINE_OPERATOR(RESULT, OP)                                               \
    friend PACELINE_INLINED RESULT operator OP(const Halves& a, const Halves& b) {  \
        return {a.low OP b.low, a.high OP b.high};                                  \
    }                                                                               \
    friend PACELINE_INLINED RESULT operator OP(const Halves& a, E b) {              \
        return {a.low OP b, a.high OP b};                                           \
    }                                                                               \
    friend PACELINE_INLINED RESULT operator OP(E a, const Halves& b) {              \
        return {a OP b.low, a OP b.high};                                           \
    }
    PACELINE_OPERATOR(Halves, +)
    PACELINE_OPERATOR(Halves, -)
    PACELINE_OPERATOR(Halves, *)
    PACELINE_OPERATOR(Halves, /)
    PACELINE_OPERATOR(Halves, &)
    PACELINE_OPERATOR(Halves, |)
    PACELINE_OPERATOR(Halves, ^)
    PACELINE_OPERATOR(Halves, <<)
    PACELINE_OPERATOR(Halves, >>)
    PACELINE_OPERATOR(Mask, <)
    PACELINE_OPERATOR(Mask, >)
    PACELINE_OPERATOR(Mask, >=)
    PACELINE_OPERATOR(Mask, ==)
#undef PACELINE_OPERATOR
    friend PACELINE_INLINED Halves operator-(const Halves& a) { return {-a.low, -a.high}; }
    Halves& operator+=(const Halves& other) { return *this = *this + other; }
};

// Returns the same bytes as another type.
template <class To, class From>
PACELINE_INLINE To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    if constexpr (kIsHalves<To> && kIsHalves<From>) {
        return {bits<typename To::Half>(from.low), bits<typename To::Half>(from.high)};
    } else {
        To to;
        memcpy(&to, &from, sizeof(to));
        return to;
    }
}

// Reads or writes a vector at any address.
template <class V, class T>
PACELINE_INLINE V read(const T* from) {
    if constexpr (kIsHalves<V>) {
        const auto* bytes = reinterpret_cast<const char*>(from);
        return {read<typename V::Half>(bytes), read<typename V::Half>(bytes + sizeof(V) / 2)};
    } else {
        V value;
        memcpy(&value, from, sizeof(value));
        return value;
    }
}
template <class V, class T>
PACELINE_INLINE void write(T* to, const V& value) {
    if constexpr (kIsHalves<V>) {
        auto* bytes = reinterpret_cast<char*>(to);
        write(bytes, value.low);
        write(bytes + sizeof(V) / 2, value.high);
    } else {
        memcpy(to, &value, sizeof(value));
    }
}

template <class V>
PACELINE_INLINE auto low_half(const V& v) {
    if constexpr (kIsHalves<V>) return v.low;
    else return read<typename Shape<V>::Half>(&v);
}
template <class V>
PACELINE_INLINE auto high_half(const V& v) {
    if constexpr (kIsHalves<V>) return v.high;
    else return read<typename Shape<V>::Half>(reinterpret_cast<const char*>(&v) + sizeof(V) / 2);
}
template <class V, class Half>
PACELINE_INLINE V join_halves(const Half& low, const Half& high) {
    if constexpr (kIsHalves<V>) {
        return {low, high};
    } else {
        const Half both[2] = {low, high};
        return read<V>(both);
    }
}

// Widening of each element to twice its size. GCC 12 compiles the plain conversion to three or five instructions, but
// the processor has one.
template <class From>
constexpr bool kWidens = false;
#if defined(PACELINE_AVX512)
template <> constexpr bool kWidens<Vector<uint16_t, 16>> = true;
template <> constexpr bool kWidens<Vector<int8_t, 32>> = true;
PACELINE_INLINE __m512i widen_elements(const Vector<uint16_t, 16>& from) {
    return _mm512_maskz_cvtepu16_epi32(0xffff, bits<__m256i>(from));
}
PACELINE_INLINE __m512i widen_elements(const Vector<int8_t, 32>& from) {
    return _mm512_maskz_cvtepi8_epi16(0xffffffff, bits<__m256i>(from));
}
#elif defined(PACELINE_AVX2)
template <> constexpr bool kWidens<Vector<uint16_t, 8>> = true;
template <> constexpr bool kWidens<Vector<int8_t, 16>> = true;
PACELINE_INLINE __m256i widen_elements(const Vector<uint16_t, 8>& from) {
    return _mm256_cvtepu16_epi32(bits<__m128i>(from));
}
PACELINE_INLINE __m256i widen_elements(const Vector<int8_t, 16>& from) {
    return _mm256_cvtepi8_epi16(bits<__m128i>(from));
}
#endif

// Converts each element, as a cast does.
template <class To, class From>
PACELINE_INLINE To convert(const From& from) {
    if constexpr (kWidens<From> && sizeof(To) == 2 * sizeof(From) && Shape<To>::kCount == Shape<From>::kCount &&
                  std::is_integral_v<typename Shape<To>::Element>) {
        return bits<To>(widen_elements(from));
    } else if constexpr (kIsHalves<To> || kIsHalves<From>) {
        using Half = typename Shape<To>::Half;
        return join_halves<To>(convert<Half>(low_half(from)), convert<Half>(high_half(from)));
    } else {
        return __builtin_convertvector(from, To);
    }
}

// Returns a where the mask is set, else b.
template <class Mask, class V>
PACELINE_INLINE V select(const Mask& mask, const V& a, const V& b) {
    if constexpr (kIsHalves<V>) return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else return mask ? a : b;
}

template <class V>
PACELINE_INLINE V splat(typename Shape<V>::Element value) {
    return value - V{};
}

// Returns {f(0), f(1), ...}.
template <class V, class F, int... I>
PACELINE_INLINE constexpr V make_some(const F& f, std::integer_sequence<int, I...>) {
    if constexpr (kIsHalves<V>) {
        using Count = std::make_integer_sequence<int, Shape<V>::kCount / 2>;
        return {make_some<typename V::Half>(f, Count{}),
                make_some<typename V::Half>([f](int i) { return f(i + Shape<V>::kCount / 2); }, Count{})};
    } else {
        return V{static_cast<typename Shape<V>::Element>(f(I))...};
    }
}
template <class V, class F>
PACELINE_INLINE constexpr V make(const F& f) {
    return make_some<V>(f, std::make_integer_sequence<int, Shape<V>::kCount>{});
}

// Joins all lanes in a fixed order: lanes that are half the length apart, and so on.
template <class V, int Apart, class Join>
PACELINE_INLINE auto over_near_lanes(const V& v, const Join& join) {
    if constexpr (Apart == 0) {
        return v[0];
    } else {
        constexpr auto partners = make<Indexes<V>>([](int i) { return i ^ Apart; });
        return over_near_lanes<V, Apart / 2>(join(v, __builtin_shuffle(v, partners)), join);
    }
}
template <class V, class Join>
PACELINE_INLINE auto over_lanes(const V& v, const Join& join) {
    if constexpr (kIsHalves<V>) return over_lanes(join(v.low, v.high), join);
    else return over_near_lanes<V, Shape<V>::kCount / 2>(v, join);
}

// Sets first to {a[0], b[0], a[1], b[1], ...}, and second to the rest.
template <class V>
PACELINE_INLINE void interleave(const V& a, const V& b, V& first, V& second) {
    if constexpr (kIsHalves<V>) {
        interleave(a.low, b.low, first.low, first.high);
        interleave(a.high, b.high, second.low, second.high);
    } else {
        constexpr int count = Shape<V>::kCount;
        constexpr auto places = make<Indexes<V>>([](int i) { return i / 2 + i % 2 * count; });
        first = __builtin_shuffle(a, b, places);
        second = __builtin_shuffle(a, b, places + count / 2);
    }
}

// The inverse of `interleave` for one vector: the elements at even places, and those at odd places.
template <class V, class Half>
PACELINE_INLINE void separate(const V& both, Half& even, Half& odd) {
    if constexpr (kIsHalves<Half>) {
        separate(both.low, even.low, odd.low);
        separate(both.high, even.high, odd.high);
    } else {
        constexpr auto places = make<Indexes<Half>>([](int i) { return 2 * i; });
        even = __builtin_shuffle(low_half(both), high_half(both), places);
        odd = __builtin_shuffle(low_half(both), high_half(both), places + 1);
    }
}

// Transposes N x N words, N vectors of N.
template <int Size, class V, int N>
PACELINE_INLINE void swap_squares(V (&rows)[N]) {
    constexpr auto places = make<Indexes<V>>([](int i) { return i & Size ? N + (i ^ Size) : i; });
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        if (i & Size) continue;
        const V a = rows[i], b = rows[i + Size];
        rows[i] = __builtin_shuffle(a, b, places);
        rows[i + Size] = __builtin_shuffle(a, b, places + Size);
    }
}
template <class V, int N>
PACELINE_INLINE void transpose(V (&rows)[N]) {
    if constexpr (kIsHalves<V>) {
        typename V::Half squares[2][2][N / 2];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            squares[2 * i / N][0][i % (N / 2)] = rows[i].low;
            squares[2 * i / N][1][i % (N / 2)] = rows[i].high;
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) transpose(squares[i / 2][i % 2]);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
            rows[i] = {squares[0][2 * i / N][i % (N / 2)], squares[1][2 * i / N][i % (N / 2)]};
    } else {
        // Off-diagonal squares are swapped: first single words, then squares of 2, 4 and 8.
        swap_squares<1>(rows);
        if constexpr (N > 2) swap_squares<2>(rows);
        if constexpr (N > 4) swap_squares<4>(rows);
        if constexpr (N > 8) swap_squares<8>(rows);
    }
}

// Caches of 8 bits: codes of keys and values, in tiles of sixteen tokens of one head. A tile of keys is [head_dim][16
// tokens], one of values [head_dim / 16][16 tokens][16], and the tokens' scales follow in bf16. Both have the order of
// packed weights with one value along `in` at a time. A code's number needs no rounding in bf16. So few rows multiply
// tiles in their blocks, and codes become numbers in registers. For many rows, or matrix tiles, they are unpacked once.
// Scores are multiplied by the scales of keys, and weights by those of values.

// One code, whose products have x as pairs of bf16 if Pairs, else as fp32.
template <int64_t Format, bool Pairs>
struct Coded {
    uint8_t byte;
};
template <int64_t Format, bool Pairs>
struct LeftOf<Coded<Format, Pairs>> {
    using Type = std::conditional_t<Pairs, bf16, float>;
};

// Returns the numbers of a register's length of codes.
template <int64_t Format>
PACELINE_INLINE Floats decode(const void* codes) {
    using Ints32 = Vector<int32_t, kRegisterLanes>;
    const auto bytes = read<Vector<int8_t, kRegisterLanes>>(static_cast<const char*>(codes));
#if defined(PACELINE_AVX512)
    const Ints32 words = bits<Ints32>(_mm512_maskz_cvtepi8_epi32(0xffff, bits<__m128i>(bytes)));
#elif defined(PACELINE_AVX2)
    const Ints32 words = bits<Ints32>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits<int64_t>(bytes))));
#else
    const Ints32 words = convert<Ints32>(bytes);
#endif
    if constexpr (Format == kCacheInt8) return convert<Floats>(words);
    // Sign, exponent and mantissa move to their places. The exponents differ by 120.
    else return bits<Floats>(bits<Words>(words << 20) & 0x87f00000u) * 0x1p120f;
}

template <int64_t Format>
struct Products<Coded<Format, false>> : Products<float> {
    static Floats weights(const Coded<Format, false>* w, int) { return decode<Format>(w); }
};
#ifdef PACELINE_BF16_PRODUCTS
template <int64_t Format>
struct Products<Coded<Format, true>> : Products<bf16> {
    static constexpr int64_t kPart = kRegisterLanes;
    static Words weights(const Coded<Format, true>* w, int) {
        return bits<Words>(decode<Format>(w)) >> 16 | bits<Words>(decode<Format>(w + kLanes));
    }
};
#endif

// The most rows that multiply tiles in their blocks, so that each code is decoded once.
constexpr int64_t kMostCodedRows = kMostRows;

// out[rows, 16 * groups] = x[rows, in] * w, as `multiply`, for up to kMostCodedRows rows.
template <class Code>
static inline void multiply_coded(
    const Left<Code>* x, int64_t x_stride, const Code* w, int64_t w_stride, int64_t in, int64_t rows, int64_t groups,
    float* out, int64_t out_stride, bool add) {
    by_parts<kMostCodedRows>(rows, [&](auto count, int64_t) {
        constexpr int height = decltype(count)::value;
        if constexpr (height <= kMostRowsOfTwo) {
            if (groups == 2)
                return multiply_few<height, 2, false>(x, x_stride, w, w_stride, in, out, out_stride, add, Ahead{});
        }
        for (int64_t group = 0; group < groups; ++group)
            multiply_few<height, 1, false>(x, x_stride, w + group * w_stride, w_stride, in, out + group * kLanes,
                                           out_stride, add, Ahead{});
    });
}

// Cache lines to prefetch with two tiles, so that all tiles of a piece fetch the next piece; see paged.h.
constexpr int64_t lines_with_tiles(int64_t dim) { return dim / 2 + 4; }

constexpr int64_t kPieceTiles = kPiece / kLanes;

// The tiles of a piece, for rows that share keys. Codes and scales of tiles that no row sees are null and zeros.
struct PieceTiles {
    const uint8_t *keys[kPieceTiles], *values[kPieceTiles];
    alignas(64) float key_scales[kPiece], value_scales[kPiece];

    // Finds the tiles of columns [from, to), multiples of kLanes, of the piece whose first position is `base`. Only
    // positions [first, end) have something; a scale elsewhere may be NaN, and counts as 0.
    void locate(const Paged<uint8_t>& paged, const Rows& rows, int64_t base, int64_t from, int64_t to, int64_t first,
                int64_t end) {
        for (int64_t i = from; i < to; i += kLanes) {
            const int64_t position = base + i, tile = i / kLanes;
            const bool is_seen = position + kLanes > first && position < end;
            const int64_t place = is_seen ? paged.place_of(rows, position) : paged.kNowhere;
            keys[tile] = paged.at(paged.cache.keys, place);
            values[tile] = paged.at(paged.cache.values, place);
            f32x16 scales[2] = {};
            if (keys[tile]) {
                const i32x16 lane = lane_numbers<i32x16>() + static_cast<int32_t>(position - first);
                const auto has_token = bits<u32x16>(lane) < static_cast<uint32_t>(end - first);
                scales[0] = select(has_token, scales_of(keys[tile], paged.dim), scales[0]);
                scales[1] = select(has_token, scales_of(values[tile], paged.dim), scales[1]);
            } else if (is_seen) {
                paged.team.fail(kNoSuchSlot);
            }
            store(key_scales + i, scales[0]);
            store(value_scales + i, scales[1]);
        }
    }
    static f32x16 scales_of(const uint8_t* tile, int64_t dim) {
        return load(reinterpret_cast<const bf16*>(tile + dim * kLanes));
    }
};

// The products of a piece's tiles. T: the type of the model.
template <class T, int64_t Format>
struct CodedProducts {
    using Code = Coded<Format, std::is_same_v<Left<T>, bf16>>;
    static constexpr bool kIsPairs = sizeof(T) == sizeof(bf16);  // whether packed weights of T are pairs
    const int64_t dim, depth;
    const PieceTiles& tiles;

    static const Code* codes(const uint8_t* tile) { return reinterpret_cast<const Code*>(tile); }

    // Computes scores [rows][kPiece] of the columns [from, to). Those of tiles that no row sees may be anything. This and
    // the functions below call begin_tile() at times, for prefetches.
    template <class Begin>
    void score(const Left<T>* queries, int64_t rows, int64_t from, int64_t to, float* scores,
               const Begin& begin_tile) const {
        for (int64_t i = from; i < to; i += 2 * kLanes) {
            begin_tile();
            const Code *first = codes(tiles.keys[i / kLanes]), *second = codes(tiles.keys[i / kLanes + 1]);
            if (first && second)
                multiply_coded(queries, depth, first, second - first, dim, rows, 2, scores + i, kPiece, false);
            else if (first || second)
                multiply_coded(queries, depth, first ? first : second, 0, dim, rows, 1,
                               scores + i + (first ? 0 : kLanes), kPiece, false);
        }
    }

    // Computes out[rows][width], the values of columns [from, to) by their weights [rows][kPiece].
    template <class Begin>
    void add_values(const Left<T>* weights, int64_t rows, int64_t from, int64_t to, float* out, int64_t width,
                    const Begin& begin_tile) const {
        bool add = false;
        for (int64_t i = from; i < to; i += kLanes) {
            if (i % (2 * kLanes) == 0) begin_tile();
            const Code* tile = codes(tiles.values[i / kLanes]);
            if (!tile) continue;
            for (int64_t d = 0; d < dim; d += 2 * kLanes)
                multiply_coded(weights + i, kPiece, tile + d * kLanes, kLanes * kLanes, kLanes, rows,
                               dim - d > kLanes ? 2 : 1, out + d, width, add);
            add = true;
        }
        if (!add)
            for (int64_t row = 0; row < rows; ++row) memset(out + row * width, 0, width * sizeof(float));
    }

    // Unpacks sixteen columns of codes along `in`, at `from`, to packed weights of T; null gives zeros. count: rows of
    // codes that exist, of `in` rows.
    static void unpack(const uint8_t* from, int64_t count, int64_t in, T* to) {
        if (!from) count = 0;
        int64_t k = 0;
        for (; k < count; k += 2)
            unrolled<kParts>([&](int part) PACELINE_INLINED {
                const Floats first = decode<Format>(from + k * kLanes + part * kRegisterLanes);
                const Floats second = decode<Format>(from + (k + 1) * kLanes + part * kRegisterLanes);
                if constexpr (kIsPairs) {
                    write(to + k * kLanes + part * 2 * kRegisterLanes, bits<Words>(first) >> 16 | bits<Words>(second));
                } else {
                    write(to + k * kLanes + part * kRegisterLanes, first);
                    write(to + (k + 1) * kLanes + part * kRegisterLanes, second);
                }
            });
        if (k < in) memset(to + k * kLanes, 0, (in - k) * kLanes * sizeof(T));
    }

    // Unpacks columns [from, to): keys as [kPiece / 16][depth][16], values as [width / 16][kPiece][16].
    template <class Begin>
    void unpack_all(int64_t from, int64_t to, T* keys, T* values, const Begin& begin_tile) const {
        for (int64_t i = from; i < to; i += kLanes) {
            begin_tile();
            unpack(tiles.keys[i / kLanes], dim, depth, keys + i * depth);
            const uint8_t* tile = tiles.values[i / kLanes];
            for (int64_t d = 0; d < dim; d += kLanes)
                unpack(tile ? tile + d * kLanes : nullptr, kLanes, kLanes, values + d * kPiece + i * kLanes);
        }
    }
};

// Returns the codes of sixteen numbers that were divided by their scale.
template <int64_t Format>
static inline Vector<uint8_t, kLanes> encode(f32x16 scaled) {
    constexpr float largest = Format == kCacheInt8 ? 127.0f : 448.0f;
    const f32x16 value = max(-max(-scaled, splat(-largest)), splat(-largest));
    if constexpr (Format == kCacheInt8) {
        // The sum has no bits for fractions, so it is rounded to the nearest integer.
        return convert<Vector<uint8_t, kLanes>>(bits<u32x16>(value + 0x1.8p23f));
    } else {
        const u32x16 word = bits<u32x16>(value), magnitude = word & 0x7fffffffu;
        const u32x16 rounded = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
        // Subnormal numbers become 0.
        const u32x16 code = select(magnitude < 0x3c800000u, u32x16{}, rounded | (word >> 24 & 0x80u));
        return convert<Vector<uint8_t, kLanes>>(code);
    }
}

// Encodes a row and calls put(d, codes) for each sixteen numbers. Returns the scale, as `encode` of ../../codes.py.
template <int64_t Format, class T, class Put>
static inline bf16 encode_row(const T* row, int64_t dim, const Put& put) {
    constexpr float largest = Format == kCacheInt8 ? 127.0f : 448.0f;
    f32x16 most_ = {}, nothing = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
        const f32x16 value = load(row + d);
        most_ = max(most_, bits<f32x16>(bits<u32x16>(value) & 0x7fffffffu));
        nothing = nothing + value * 0.0f;  // NaN if a number is not finite
    }
    const float quotient = max_lane(most_) / largest, least_ = quotient < 0x1p-100f ? 0x1p-100f : quotient;
    const bf16 scale = narrow(splat(least_ + sum_lanes(nothing)))[0];
    const f32x16 wide = widen(u16x16{} + scale);
    for (int64_t d = 0; d < dim; d += kLanes) put(d, encode<Format>(load(row + d) / wide));
    return scale;
}

template <class T, int64_t Format>
static void store_codes(const Op& op, const Step& step, Team& team) {
    const Group& group = step.groups[op.group];
    const Cache& cache = op.cache;
    const int64_t dim = cache.head_dim, row = cache.kv_heads * dim;
    for_each_row(team, step.tokens, row, [&](int64_t token) {
        const int64_t slot = group.write_slots[token], offset = group.write_offsets[token];
        if (slot < 0 || slot >= cache.slots || offset < 0 || offset >= group.block_tokens)
            return team.fail(kNoSuchSlot);
        const int64_t lane = offset % kLanes;
        for (int64_t head = 0; head < cache.kv_heads; ++head) {
            const int64_t to = slot * cache.slot_stride + head * cache.head_stride + (offset - lane) * cache.token_stride;
            const int64_t from = token * row + head * dim;
            uint8_t* keys = static_cast<uint8_t*>(cache.keys) + to;
            uint8_t* values = static_cast<uint8_t*>(cache.values) + to;
            // Threads write other tokens of the same tile at the same time.
            const bf16 key_scale =
                encode_row<Format>(static_cast<const T*>(op.a) + from, dim, [&](int64_t d, const auto& codes) {
                    uint8_t own[kLanes];
                    write(own, codes);
                    for (int64_t i = 0; i < kLanes; ++i) keys[(d + i) * kLanes + lane] = own[i];
                });
            const bf16 value_scale =
                encode_row<Format>(static_cast<const T*>(op.b) + from, dim, [&](int64_t d, const auto& codes) {
                    write(values + (d + lane) * kLanes, codes);
                });
            memcpy(keys + dim * kLanes + lane * sizeof(bf16), &key_scale, sizeof(bf16));
            memcpy(values + dim * kLanes + lane * sizeof(bf16), &value_scale, sizeof(bf16));
        }
    });
}

template <class T>
static void store_kv(const Op& op, const Step& step, Team& team) {
    if (op.format == kCacheInt8) store_codes<T, kCacheInt8>(op, step, team);
    else if (op.format == kCacheFp8) store_codes<T, kCacheFp8>(op, step, team);
    else store_whole<T>(op, step, team);
}

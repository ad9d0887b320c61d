// Attention over the paged cache.
//
// A context is cut at fixed positions into pieces of kPiece keys. Each piece has a softmax of its own, and pieces are
// joined in order. So a row's result depends on its own context only: not on the places of blocks, not on other rows of
// the batch, and not on whether one thread takes all pieces of a row or several threads share them.

constexpr int64_t kMostPartialBytes = 64 << 20;
constexpr float kNothing = -1e30f;  // the maximum of no scores; unlike -inf it can be subtracted from itself

// The result of one piece for its rows, or of all pieces so far: maximum of the scores (in base 2), sum of weights, and
// weighted sum of values.
struct Partial {
    float *max, *sum, *values;

    // Returns the results from `row` on. width: of a row of values.
    Partial from(int64_t row, int64_t width) const { return {max + row, sum + row, values + row * width}; }
};

// T: the type of the model; Format: that of the cache.
template <class T, int64_t Format = kCacheWhole>
struct Attention {
    static constexpr bool kCoded = Format != kCacheWhole;
    using Stored = std::conditional_t<kCoded, uint8_t, T>;
    const Op& op;
    const Step& step;
    Team& team;
    const Paged<T> paged{op, step, team};
    const Paged<Stored> stored{op, step, team};
    const Group& group = paged.group;
    const int64_t heads = op.n0, shared_by = heads / op.cache.kv_heads;
    const int64_t dim = paged.dim, depth = paged.depth, width = paged.width;
    Tasks tasks{step, op.cache.kv_heads, shared_by};
    const int64_t max_rows = round_up(tasks.token_block * shared_by, kLanes);

    int64_t count(const Rows& rows) const { return (rows.end - rows.begin) * shared_by; }
    int64_t first_key(const Rows& rows) const {
        return group.window ? most(0, rows.first_position - group.window + 1) : 0;
    }
    // Returns the position of the last key that a token sees. It never decreases from one token to the next.
    int64_t last_key(const Rows& rows, int64_t token) const {
        const int64_t position = rows.first_position + token - rows.begin;
        if (!op.n1 || !step.last_keys) return position;
        const int64_t last = step.last_keys[token];
        return op.n2 && group.window ? least(last, position + group.window - 1) : last;
    }
    int64_t end_key(const Rows& rows) const { return last_key(rows, rows.end - 1) + 1; }
    int64_t first_piece(const Rows& rows) const { return first_key(rows) / kPiece; }
    int64_t end_piece(const Rows& rows) const { return (end_key(rows) + kPiece - 1) / kPiece; }

    // Pieces of the rows that have most.
    int64_t most_pieces() const {
        int64_t most_ = 0;
        for (int64_t r = 0; r < step.requests; ++r)
            for (int64_t block = 0; block < tasks.blocks(r); ++block) {
                const Rows rows = tasks.rows_at(r, block * op.cache.kv_heads);
                most_ = most(most_, end_piece(rows) - first_piece(rows));
            }
        return most_;
    }

    int64_t partial_bytes() const { return round_up(max_rows * (2 + width) * sizeof(float), 64); }
    Partial partial_at(void* memory) const {
        float* floats = static_cast<float*>(memory);
        return {floats + max_rows * width, floats + max_rows * (width + 1), floats};
    }

    // One thread's memory for a piece. `weights` and `scores` are those of one block of rows.
    struct Space {
        Left<T>* queries;
        T *keys, *values;  // packed; if values stay in their blocks, `values` is a row of zeros
        const T** rows;    // the values of each key, if they stay in their blocks
        Left<T>* weights;
        float* scores;
        PieceTiles* tiles;  // if the cache is coded
        Partial piece, total;
    };
    Space space(Worker& worker) const {
        const int64_t item = sizeof(T), left = sizeof(Left<T>);
        const int64_t sizes[] = {max_rows * depth * left,
                                 kPiece * depth * item,
                                 (kValuesStay ? 1 : kPiece) * width * item,
                                 kValuesStay ? kPiece * int64_t{sizeof(T*)} : 0,
                                 kRowBlock * kPiece * left,
                                 kRowBlock * kPiece * 4,
                                 kCoded ? int64_t{sizeof(PieceTiles)} : 0,
                                 partial_bytes(),
                                 partial_bytes()};
        constexpr int count = sizeof(sizes) / sizeof(*sizes);
        int64_t bytes = 0;
        for (int64_t size : sizes) bytes += round_up(size, 64);
        char* at = static_cast<char*>(worker.scratch.take(bytes));
        void* parts[count];
        for (int i = 0; i < count; ++i) parts[i] = at, at += round_up(sizes[i], 64);
        return {static_cast<Left<T>*>(parts[0]),    static_cast<T*>(parts[1]),       static_cast<T*>(parts[2]),
                static_cast<const T**>(parts[3]),   static_cast<Left<T>*>(parts[4]), static_cast<float*>(parts[5]),
                static_cast<PieceTiles*>(parts[6]), partial_at(parts[7]),            partial_at(parts[8])};
    }

    // Columns [from, to) of a piece, multiples of kDepth, so that sums begin and end at the same places for every row.
    struct Span {
        int64_t from, to;
    };
    // Returns the columns that queries see of it, from the one at position `first` to one whose last key is `last`;
    // empty if there are none.
    Span seen(int64_t base, int64_t first, int64_t last) const {
        const int64_t from = group.window ? most(0, first - group.window + 1 - base) : 0;
        return {from / kDepth * kDepth, least(kPiece, round_up(most(0, last + 1 - base), kDepth))};
    }

    // For few rows, packing of keys does not pay. Instead, tiles can read keys directly from their blocks and multiply
    // them by packed queries. Each score is the same sum in the same order.
    bool keys_stay(const Rows& rows) const {
        return kTiles<T> && !kCoded && count(rows) <= kRowBlock && dim == depth && group.block_tokens % kLanes == 0;
    }

    // For few rows, coded keys and values become numbers in registers. Each sum has the same numbers in the same order.
    bool codes_stay(const Rows& rows) const { return kCoded && !kTiles<T> && count(rows) <= kMostCodedRows; }

    // The prefetch of the keys and values of a piece.
    using Prefetch = typename Paged<Stored>::Prefetch;
    Prefetch prefetch_of(const Rows& rows, int64_t piece) const {
        return {rows, piece * kPiece, least((piece + 1) * kPiece, end_key(rows))};
    }

    // Products in fp32 read each value by itself, so packing of values would not pay.
    static constexpr bool kValuesStay = std::is_same_v<Left<T>, float> && !kCoded;

    // Copies queries to space.queries, packed if keys stay in their blocks.
    void take_queries(const Rows& rows, const Space& space) const {
        const auto find = [&](int64_t row) {
            const int64_t token = rows.begin + row / shared_by, head = rows.kv_head * shared_by + row % shared_by;
            return static_cast<const T*>(op.a) + (token * heads + head) * dim;
        };
        const int64_t row_count = count(rows);
#ifdef PACELINE_AMX
        if (keys_stay(rows)) {
            for (int64_t first = 0; first < row_count; first += kLanes)
                paged.pack_rows([&](int64_t i) { return first + i < row_count ? find(first + i) : nullptr; },
                                space.queries + first * depth, [] {});
            return;
        }
#endif
        for (int64_t row = 0; row < row_count; ++row) {
            copy_values(find(row), dim, space.queries + row * depth);
            memset(space.queries + row * depth + dim, 0, (depth - dim) * sizeof(Left<T>));
        }
    }

#ifdef PACELINE_AMX
    // Computes scores of keys in the columns of `span` for packed queries. Scores that no row sees may be anything.
    void score_in_place(
        const Rows& rows, int64_t base, Span span, Prefetch& prefetch, const Space& space, Worker& worker) const {
        alignas(64) float products[kPiece * kRowBlock];
        const int64_t row_count = count(rows), groups = row_count > kLanes ? 2 : 1, stride = groups * kLanes;
        for (int64_t i = span.from; i < span.to; i += kLanes) {
            const int64_t place = paged.place_of(rows, base + i);
            prefetch.issue_by_size(stored, kPrefetchAtTile);
            if (place == Paged<T>::kNowhere) continue;
            multiply(worker, static_cast<const T*>(op.cache.keys) + place, op.cache.token_stride, space.queries,
                     depth * kLanes, depth, kLanes, groups, products + i * stride, stride);
        }
        for (int64_t i = span.from; i < span.to; i += kLanes)
            for (int64_t first = 0; first < row_count; first += kLanes) {
                if (row_count - first <= 4) {
                    f32x16 columns[4];
                    take_columns(products + i * stride + first, stride, columns);
                    for (int64_t row = first; row < row_count; ++row)
                        store(space.scores + row * kPiece + i, columns[row - first]);
                    break;
                }
                u32x16 square[kLanes];
                for (int64_t key = 0; key < kLanes; ++key)
                    square[key] = read<u32x16>(products + (i + key) * stride + first);
                transpose(square);
                for (int64_t row = first; row < least(row_count, first + kLanes); ++row)
                    write(space.scores + row * kPiece + i, square[row - first]);
            }
    }
#else
    void score_in_place(const Rows&, int64_t, Span, Prefetch&, const Space&, Worker&) const {}  // only tiles can
#endif

    // Computes softmax weights of one row of Vectors * kLanes columns, which sees `count` columns from `first` on. If the
    // cache is coded, scales are those of the columns' keys and values.
    template <int Vectors>
    void weigh(const float* scores, Left<T>* weights, int64_t first, int64_t count, const float* key_scales,
               const float* value_scales, float* max_, float* sum_) const {
        const i32x16 lane = lane_numbers<i32x16>();
        const float cap = op.f1 * kLog2E;
        f32x16 score[Vectors], largest = splat(kNothing), sum = {};
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) {
            score[i] = load(scores + i * kLanes) * (op.f0 * kLog2E);
            if constexpr (kCoded) score[i] = score[i] * load(key_scales + i * kLanes);
            if (op.f1 != 0.0f)
                score[i] = cap - 2.0f * cap * reciprocal(1.0f + exp2(score[i] * (2.0f / op.f1)));
        }
        if (first > 0 || count < Vectors * kLanes)
#pragma GCC unroll 8
            for (int i = 0; i < Vectors; ++i) {
                const i32x16 column = lane + static_cast<int32_t>(i * kLanes - first);
                const auto is_seen = bits<u32x16>(column) < static_cast<uint32_t>(count);
                score[i] = select(is_seen, score[i], splat(-__builtin_inff()));
            }
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) largest = max(largest, score[i]);
        const float top = max_lane(largest);
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) {
            const f32x16 weight = exp2(score[i] - top);
            sum += weight;
            if constexpr (kCoded) store(weights + i * kLanes, weight * load(value_scales + i * kLanes));
            else store(weights + i * kLanes, weight);
        }
        *max_ = top;
        *sum_ = sum_lanes(sum);
    }

    // Computes the weights of rows [row, row + height), whose scores are in columns [span.from, span.to) of a piece.
    void weigh_rows(
        const Rows& rows, int64_t base, int64_t row, int64_t height, Span span, const Space& space,
        const Partial& piece) const {
        static_assert(kPiece == 8 * kLanes && kDepth == 2 * kLanes, "the cases below");
        for (int64_t i = 0; i < height; ++i) {
            const int64_t index = (row + i) / shared_by, position = rows.first_position + index;
            const int64_t begin = base + span.from, width = span.to - span.from;
            const int64_t first = group.window ? most(0, position - group.window + 1 - begin) : 0;
            const int64_t last = last_key(rows, rows.begin + index);
            const int64_t count = most(0, least(last + 1 - begin, width) - first);
            const float* scores = space.scores + i * kPiece + span.from;
            Left<T>* weights = space.weights + i * kPiece + span.from;
            float *max_ = piece.max + i, *sum = piece.sum + i;
            const float* key_scales = kCoded ? space.tiles->key_scales + span.from : nullptr;
            const float* value_scales = kCoded ? space.tiles->value_scales + span.from : nullptr;
            const auto run = [&](auto vectors) {
                weigh<decltype(vectors)::value>(scores, weights, first, count, key_scales, value_scales, max_, sum);
            };
            switch (width / kDepth) {
                case 1: run(std::integral_constant<int, 2>{}); break;
                case 2: run(std::integral_constant<int, 4>{}); break;
                case 3: run(std::integral_constant<int, 6>{}); break;
                default: run(std::integral_constant<int, 8>{});
            }
        }
    }

    // The same as attend_rows() if codes stay in their blocks.
    void attend_codes(const Rows& rows, int64_t base, int64_t row, int64_t height, Span span, Prefetch& prefetch,
                      const Space& space, const Partial& piece) const {
        const CodedProducts<T, Format> products{dim, depth, *space.tiles};
        const auto ahead = [&] { prefetch.issue(stored, lines_with_tiles(dim)); };
        products.score(space.queries + row * depth, height, span.from, span.to, space.scores, ahead);
        weigh_rows(rows, base, row, height, span, space, piece);
        products.add_values(space.weights, height, span.from, span.to, piece.values, width, ahead);
    }

    // Computes the result of a piece for rows [row, row + height).
    void attend_rows(
        const Rows& rows, int64_t base, int64_t row, int64_t height, Prefetch& prefetch, const Space& space,
        const Partial& piece, Worker& worker) const {
        const Span span = seen(base, rows.first_position + row / shared_by,
                               last_key(rows, rows.begin + (row + height - 1) / shared_by));
        if (span.from >= span.to) {
            clear(piece, 0, height);
            return;
        }
        if constexpr (kCoded)
            if (codes_stay(rows)) return attend_codes(rows, base, row, height, span, prefetch, space, piece);
        const bool scored = keys_stay(rows);
        for (int64_t i = span.from; i < span.to && !scored; i += kOutBlock)
            multiply(worker, space.queries + row * depth, depth, space.keys + i * depth, depth * kLanes, depth, height,
                     2, space.scores + i, kPiece);
        weigh_rows(rows, base, row, height, span, space, piece);
        if constexpr (kValuesStay) {
            const Weighing<T> weighing{space.weights + span.from, space.rows + span.from, span.to - span.from, dim,
                                       piece.values, width};
            by_parts<kMostRows>(height, [&](auto count, int64_t first) {
                weighing.template run<decltype(count)::value>(
                    first, [&](int64_t groups) { prefetch.issue(stored, kPrefetchAtColumns * groups); });
            });
        } else {
            // Keep tiles that are configured for sixteen keys: a new configuration takes longer than some idle rows.
            const int64_t tile_height = scored ? most(height, kLanes) : height;
            for (int64_t d = 0; d < width; d += kOutBlock) {
                prefetch.issue(stored, kPrefetchAtProduct);
                multiply(worker, space.weights + span.from, kPiece, space.values + d * kPiece + span.from * kLanes,
                         kPiece * kLanes, span.to - span.from, tile_height, width - d > kLanes ? 2 : 1,
                         piece.values + d, width);
            }
        }
    }

    // Finds keys and values of the columns of `span`, and packs those that do not stay in their blocks.
    void take_piece(const Rows& rows, int64_t base, Span span, Prefetch& prefetch, const Space& space) const {
        const int64_t first = first_key(rows), end = end_key(rows);
        if constexpr (kCoded) {
            space.tiles->locate(stored, rows, base, span.from, span.to, first, end);
            if (!codes_stay(rows))
                CodedProducts<T, Format>{dim, depth, *space.tiles}.unpack_all(
                    span.from, span.to, space.keys, space.values, [&] { prefetch.issue(stored, lines_with_tiles(dim)); });
        } else {
            const bool scored = keys_stay(rows);
            if (kValuesStay) memset(space.values, 0, width * sizeof(T));
            for (int64_t i = span.from; i < span.to; i += kDepth) {
                typename Paged<T>::Places places;
                paged.locate(rows, base + i, first, end, places);
                if (!scored) paged.pack_keys(places, space.keys + i * depth, prefetch);
                if constexpr (kValuesStay)
                    for (int64_t key = 0; key < kDepth; ++key) {
                        const T* row = paged.at(op.cache.values, places[key]);
                        space.rows[i + key] = row ? row : space.values;
                    }
                else
                    paged.pack_values(places, space.values + i * kLanes, prefetch);
            }
        }
    }

    // Computes the result of a piece for all rows, after take_queries(). place(row): memory for the results of the rows
    // from `row` on. Calls use(row, height) after each block of rows.
    template <class Place, class Use>
    void attend(
        const Rows& rows, int64_t piece, Prefetch& prefetch, const Space& space, Worker& worker, const Place& place,
        const Use& use) const {
        const int64_t base = piece * kPiece, row_count = count(rows);
        const Span span = seen(base, rows.first_position, end_key(rows) - 1);
        if (keys_stay(rows)) score_in_place(rows, base, span, prefetch, space, worker);
        take_piece(rows, base, span, prefetch, space);
        for (int64_t row = 0; row < row_count; row += kRowBlock) {
            const int64_t height = least(kRowBlock, row_count - row);
            const Partial own = place(row);
            clear(own, height, round_up(height, kLanes));
            attend_rows(rows, base, row, height, prefetch, space, own, worker);
            use(row, height);
        }
    }

    // Sets rows to the result of no keys. `join` computes whole lanes. Lanes after the last row must be set too,
    // because arithmetic with subnormal numbers is slow.
    static void clear(const Partial& partial, int64_t first, int64_t end) {
        for (int64_t row = first; row < end; ++row) {
            partial.max[row] = kNothing;
            partial.sum[row] = 0.0f;
        }
    }

    void begin(const Rows& rows, const Partial& total) const {
        clear(total, 0, round_up(count(rows), kLanes));
        memset(total.values, 0, count(rows) * width * sizeof(float));
    }

    void join(int64_t row_count, const Partial& piece, const Partial& total) const {
        for (int64_t first = 0; first < row_count; first += kLanes) {
            const f32x16 max_ = load(piece.max + first), old_max = load(total.max + first), top = max(max_, old_max);
            const f32x16 factors = exp2(max_ - top), old_factors = exp2(old_max - top);
            const f32x16 sum = load(piece.sum + first);
            store(total.max + first, top);
            store(total.sum + first, load(total.sum + first) * old_factors + sum * factors);
            for (int64_t i = 0; i < least(kLanes, row_count - first); ++i) {
                if (sum[i] == 0.0f) continue;  // the row sees nothing of this piece
                const f32x16 factor = splat(factors[i]), old_factor = splat(old_factors[i]);
                for (int64_t d = (first + i) * width; d < (first + i + 1) * width; d += kLanes)
                    store(total.values + d, fma(load(total.values + d), old_factor, load(piece.values + d) * factor));
            }
        }
    }

    // Returns the factor on the weighted sum of a row's values. A sink takes part in the softmax as a key without value.
    float factor_of(const Partial& total, int64_t row, int64_t head) const {
        const float* sinks = static_cast<const float*>(op.b);
        if (!sinks) return 1.0f / total.sum[row];
        const float sink = sinks[head] * kLog2E, max_ = total.max[row], top = sink > max_ ? sink : max_;
        const float kept = exp2(splat(max_ - top))[0], added = exp2(splat(sink - top))[0];
        return kept / (total.sum[row] * kept + added);
    }

    void finish(const Rows& rows, const Partial& total) const {
        for (int64_t row = 0; row < count(rows); ++row) {
            const int64_t token = rows.begin + row / shared_by, head = rows.kv_head * shared_by + row % shared_by;
            T* out = static_cast<T*>(op.out) + (token * heads + head) * dim;
            const float factor = factor_of(total, row, head);
            for (int64_t d = 0; d < dim; d += kLanes)
                store_some(out + d, load(total.values + row * width + d) * factor, dim - d);
        }
    }
};

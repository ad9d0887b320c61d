// Low-rank adapters of linear layers: out = factors * out + scale * (up (down x) + bias), for rows whose token has an
// adapter. Without factors, they are 1.
//
// A task computes a few rows whole, first `down` and then `up`. So there is no wait for other threads between the two,
// and threads that share an adapter read it from memory at about the same time. All sums are in fp32, in an order that
// depends only on the sizes of the layer and the adapter.

constexpr int64_t kAdaptedRows = 4;  // rows of one adapter that are computed together, to load its weights once

// The vectors of `down` or `up` that are summed together, so that the sums need not wait for each other.
constexpr int kAdaptedVectors = kRegisters == 32 ? 4 : 2;

// sums[row][0 .. rank) = scale * down x
template <int Rows, class T, class W>
static void shrink(const LowRank& part, const T* const* x, int64_t in, float (*sums)[kMostRank]) {
    constexpr int kRanks = Rows == 1 ? kAdaptedVectors : kAdaptedVectors / 2;
    const W* down = static_cast<const W*>(part.down);
    const auto some = [&](int64_t first, auto ranks) {
        constexpr int count = decltype(ranks)::value;
        f32x16 added[Rows][count] = {};
        const auto add = [&](int64_t i, const auto& read) PACELINE_INLINED {
            f32x16 values[Rows];
            unrolled<Rows>([&](int row) PACELINE_INLINED { values[row] = read(x[row] + i); });
            unrolled<count>([&](int rank) PACELINE_INLINED {
                const f32x16 weights = read(down + (first + rank) * in + i);
                unrolled<Rows>([&](int row) PACELINE_INLINED {
                    added[row][rank] = fma(values[row], weights, added[row][rank]);
                });
            });
        };
        int64_t i = 0;
        for (; i + kLanes <= in; i += kLanes) add(i, [](const auto* from) PACELINE_INLINED { return load(from); });
        if (i < in) add(i, [&](const auto* from) PACELINE_INLINED { return load_some(from, in - i); });
        unrolled<Rows>([&](int row) PACELINE_INLINED {
            unrolled<count>([&](int rank) PACELINE_INLINED {
                sums[row][first + rank] = part.scale * sum_lanes(added[row][rank]);
            });
        });
    };
    int64_t rank = 0;
    for (; rank + kRanks <= part.rank; rank += kRanks) some(rank, std::integral_constant<int, kRanks>{});
    for (; rank < part.rank; ++rank) some(rank, std::integral_constant<int, 1>{});
}

// out[row][0 .. size) = factors * out[row] + up sums[row] + scale * bias
template <int Rows, class T, class W>
static void expand(const LowRank& part, const float (*sums)[kMostRank], int64_t size, T* const* out) {
    constexpr int kVectors = Rows == 1 ? kAdaptedVectors : kAdaptedVectors / 2;
    const W *up = static_cast<const W*>(part.up), *bias = static_cast<const W*>(part.bias);
    const auto some = [&](int64_t first, int64_t count, auto vectors) {
        constexpr int length = decltype(vectors)::value;
        f32x16 added[Rows][length] = {};
        const auto each = [&](const W* from, const auto& factor) PACELINE_INLINED {
            unrolled<length>([&](int i) PACELINE_INLINED {
                const W* own = from + i * kLanes;
                const f32x16 weights = length > 1 ? load(own) : load_some(own, count);
                unrolled<Rows>([&](int row) PACELINE_INLINED {
                    added[row][i] = fma(splat(factor(row)), weights, added[row][i]);
                });
            });
        };
        for (int64_t rank = 0; rank < part.rank; ++rank)
            each(up + rank * size + first, [&](int row) PACELINE_INLINED { return sums[row][rank]; });
        if (bias) each(bias + first, [&](int) PACELINE_INLINED { return part.scale; });
        unrolled<Rows>([&](int row) PACELINE_INLINED {
            unrolled<length>([&](int i) PACELINE_INLINED {
                T* own = out[row] + first + i * kLanes;
                const int64_t left = length > 1 ? kLanes : count;
                const f32x16 before = load_some(own, left);
                const f32x16 kept = part.factors ? before * load_some(part.factors + first + i * kLanes, left) : before;
                store_some(own, kept + added[row][i], left);
            });
        });
    };
    int64_t i = 0;
    for (; i + kVectors * kLanes <= size; i += kVectors * kLanes)
        some(i, kLanes, std::integral_constant<int, kVectors>{});
    for (; i < size; i += kLanes) some(i, least(kLanes, size - i), std::integral_constant<int, 1>{});
}

template <int Rows, class T, class W>
static void adapt_rows(const Op& op, const LowRank& part, int64_t first) {
    alignas(64) float sums[Rows][kMostRank];
    const T* x[Rows];
    T* out[Rows];
    for (int row = 0; row < Rows; ++row) {
        x[row] = static_cast<const T*>(op.a) + (first + row) * op.n2;
        out[row] = static_cast<T*>(op.out) + (first + row) * op.n1;
    }
    shrink<Rows, T, W>(part, x, op.n0, sums);
    expand<Rows, T, W>(part, sums, op.n1, out);
}

// One layer, or several consecutive ones with the same input.
template <class T, class W>
static void adapt_layers(const Op& op, const Step& step, Team& team) {
    const int64_t* given = static_cast<const int64_t*>(op.c);
    const int64_t* slots = given ? given : step.adapters;
    const int64_t rows = op.rows * step.tokens, each = given ? 1 : op.rows, layers = 1 + op.joined;
    if (!slots || !rows) return;
    // At least two tasks for each thread, if there are so many rows.
    const int64_t share = least(4 * kAdaptedRows, rows * layers / (2 * team.threads()));
    const int64_t height = share < kAdaptedRows ? most(1, share) : share / kAdaptedRows * kAdaptedRows;
    const int64_t blocks = (rows + height - 1) / height;
    team.for_each(blocks * layers, [&](int64_t task, Worker&) {
        const Op& own = (&op)[task % layers];
        const LowRank* parts = static_cast<const LowRank*>(own.b);
        const int64_t begin = task / layers * height, end = least(rows, begin + height);
        for (int64_t row = begin, next; row < end; row = next) {
            const int64_t slot = slots[row / each];
            for (next = row + 1; next < least(end, row + kAdaptedRows) && slots[next / each] == slot;) ++next;
            if (slot < 0 || parts[slot].rank == 0) continue;
            if (next - row == kAdaptedRows) adapt_rows<kAdaptedRows, T, W>(own, parts[slot], row);
            else for (int64_t i = row; i < next; ++i) adapt_rows<1, T, W>(own, parts[slot], i);
        }
    });
}

template <class T>
static void adapt(const Op& op, const Step& step, Team& team) {
    if (op.format == kBf16) adapt_layers<T, bf16>(op, step, team);
    else adapt_layers<T, float>(op, step, team);
}

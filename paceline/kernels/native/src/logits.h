// The logits layer, which also finds the best token of each row.

// The rank of a number and its place: higher if the number is larger, or if it is equal and its place is lower.
static inline uint64_t rank_of(int32_t order, int64_t place) {
    return uint64_t{static_cast<uint32_t>(order) ^ 1u << 31} << 32 | ~static_cast<uint32_t>(place);
}
static inline int64_t place_of(uint64_t rank) { return static_cast<uint32_t>(~rank); }

// `order_of` of up to sixteen numbers. Lanes after the last number have the order of -inf.
PACELINE_INLINE i32x16 orders_at(const float* values, int64_t count) {
    if (count >= kLanes) return order_of(load(values));
    float lanes[kLanes];
    store(lanes, splat(-__builtin_inff()));
    memcpy(lanes, values, count * sizeof(float));
    return order_of(load(lanes));
}

// Raises a row's highest rank if one of the numbers at places [first, first + count) has a higher rank.
static inline void raise_rank(uint64_t* rank, const float* values, int64_t first, int64_t count) {
    i32x16 largest = splat<i32x16>(INT32_MIN);
    for (int64_t i = 0; i < count; i += kLanes) largest = max(orders_at(values + i, count - i), largest);
    const int32_t top = max_lane(largest);
    uint64_t known = __atomic_load_n(rank, __ATOMIC_RELAXED);
    if (rank_of(top, first) <= known) return;  // the usual case
    int64_t place = 0;
    while (max_lane(orders_at(values + place, count - place)) != top) place += kLanes;
    while (orders_at(values + place, 1)[0] != top) ++place;
    const uint64_t own = rank_of(top, first + place);
    while (known < own && !__atomic_compare_exchange_n(rank, &known, own, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// A linear layer with results in fp32. It also finds the first place of the largest number of each row.
template <class T, class Matrix>
static void logits_layer(const Op& op, const Step& step, Team& team) {
    const int64_t rows = op.rows * step.tokens;
    if (rows == 0) return;
    const auto input = Matrix::input(op, step, team, Matrix::columns(op));
    const Matrix matrix = Matrix::of(op.b, op);
    float* outs = static_cast<float*>(op.out);
    int64_t* places = static_cast<int64_t*>(const_cast<void*>(op.c));
    uint64_t* ranks = reinterpret_cast<uint64_t*>(places);
    for (int64_t row = 0; row < rows; ++row) ranks[row] = 0;
    const int64_t outputs = op.n1, width = Matrix::kMostOut, blocks = (outputs + width - 1) / width;
    team.for_each_restartable(input.chunks * blocks, itself, [=](int64_t task, Worker& worker) {
        const int64_t first = task % blocks * width, count = least(width, outputs - first);
        Slice<Matrix> slices[kTaskOut / kOutBlock];
        int64_t slice = 0;
        for (int64_t i = 0; i < count; i += kOutBlock) slices[slice++] = {&matrix, first + i};
        Matrix::multiply_slices(input, worker, task / blocks, slices, slice, [&](int64_t row, const float* sums) {
            float* out = outs + row * outputs + first;
            for (int64_t i = 0; i < count; i += kLanes)
                store_some(out + i, round_to(static_cast<const T*>(nullptr), load(sums + i)), count - i);
            raise_rank(ranks + row, out, first, count);
        });
    });
    for (int64_t row = 0; row < rows; ++row) places[row] = place_of(ranks[row]);
}

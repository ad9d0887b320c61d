// Linear layers and the embedding, over packed weights.

constexpr int64_t kChunkBytes = 1 << 20;  // of x that stay in a core's cache while all weights pass by

// x with rows of length `in`: where op.n0 is less, a copy with zeros behind each row.
template <class T>
static const T* pad_rows(const Op& op, Team& team, int64_t rows, int64_t in, int64_t* stride) {
    const T* x = static_cast<const T*>(op.a);
    *stride = op.n2;
    if (in == op.n0) return x;
    T* copy = static_cast<T*>(team.shared(rows * in * sizeof(T)));
    team.for_each(rows, [&](int64_t row, Worker&) {
        memcpy(copy + row * in, x + row * op.n2, op.n0 * sizeof(T));
        memset(copy + row * in + op.n0, 0, (in - op.n0) * sizeof(T));
    });
    *stride = in;
    return copy;
}

// Rows of x that one task takes, of `in` values each.
template <class T>
static int64_t rows_of_chunk(int64_t rows, int64_t in) {
    return least(rows, most(kRowBlock, kChunkBytes / int64_t(in * sizeof(T)) / kRowBlock * kRowBlock));
}

template <class T>
static inline void finish(const float* sums, const T* bias, T* out, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        f32x16 value = load(sums + i);
        if (bias) value += load_some(bias + i, count - i);
        store_some(out + i, value, count - i);
    }
}

template <class T>
static void linear(const Op& op, const Step& step, Team& team) {
    const int64_t rows = op.rows * step.tokens, in = padded<T>(op.n0), outputs = op.n1;
    int64_t stride;
    const T* x = pad_rows<T>(op, team, rows, in, &stride);
    const T* weights = static_cast<const T*>(op.b);
    const T* bias = static_cast<const T*>(op.c);
    T* out = static_cast<T*>(op.out);
    const int64_t chunk = rows_of_chunk<T>(rows, in);
    const int64_t blocks = (outputs + kOutBlock - 1) / kOutBlock;
    team.for_each(rows ? (rows + chunk - 1) / chunk * blocks : 0, [&](int64_t task, Worker& worker) {
        const int64_t first_row = task / blocks * chunk, first_out = task % blocks * kOutBlock;
        const int64_t width = least(kOutBlock, outputs - first_out);
        alignas(64) float sums[kRowBlock * kOutBlock];
        for (int64_t row = first_row; row < least(rows, first_row + chunk); row += kRowBlock) {
            const int64_t height = least(kRowBlock, rows - row);
            multiply(worker, x + row * stride, stride, weights + first_out * in, in * kLanes, in, height,
                     width > kLanes ? 2 : 1, sums, kOutBlock);
            for (int64_t i = 0; i < height; ++i)
                finish(sums + i * kOutBlock, bias ? bias + first_out : nullptr, out + (row + i) * outputs + first_out,
                       width);
        }
    });
}

// to[size] = row `lane` of sixteen packed ones, times the factor.
template <class T>
static void copy_row(const T* packed, int64_t lane, int64_t size, float factor, T* to) {
    constexpr int64_t pair = sizeof(T) == sizeof(bf16) ? 2 : 1;
    const T* row = packed + lane * pair;
    for (int64_t i = 0; i < size; i += kLanes) {
        T lanes[kLanes] = {};
        const int64_t count = least(kLanes, size - i);
        for (int64_t k = 0; k < count; ++k) lanes[k] = row[(i + k) / pair * pair * kLanes + (i + k) % pair];
        store_some(to + i, load(lanes) * factor, count);
    }
}

template <class T>
static void embed(const Op& op, const Step& step, Team& team) {
    const int64_t* ids = op.a ? static_cast<const int64_t*>(op.a) : step.token_ids;
    const T* weights = static_cast<const T*>(op.b);
    const int64_t in = padded<T>(op.n0);
    team.for_each(op.rows * step.tokens, [&](int64_t token, Worker&) {
        const int64_t id = ids[token];
        if (id < 0 || id >= op.n1) return team.fail(kNoSuchToken);
        copy_row(weights + id / kLanes * kLanes * in, id % kLanes, op.n0, op.f0,
                 static_cast<T*>(op.out) + token * op.n0);
    });
}

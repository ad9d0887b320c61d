// Linear layers and the embedding, over packed weights.

constexpr int64_t kChunkBytes = 1 << 20;  // of x that stay in a core's second cache while all weights pass by
constexpr int64_t kPartDepth = 320;       // along `in`, so many of a block of weights stay in its first cache
constexpr int64_t kTaskOut = 64;          // outputs of one task where there are many

// x with rows of padded length: where `in` is no multiple of kDepth, a copy with zeros behind each row.
template <class T>
static const T* pad_rows(const Op& op, Team& team, int64_t rows, int64_t* stride) {
    const T* x = static_cast<const T*>(op.a);
    const int64_t in = padded<T>(op.n0);
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

template <class T>
static inline void finish(const float* sums, const T* bias, T* out, int64_t count) {
    int64_t i = 0;
    if (!bias)
        for (; i + kLanes <= count; i += kLanes) store(out + i, load(sums + i));
    for (; i < count; i += kLanes) {
        f32x16 value = load(sums + i);
        if (bias) value += load_some(bias + i, count - i);
        store_some(out + i, value, count - i);
    }
}

// A linear layer, cut into tasks: rows [first_row, end_row) and outputs [first_out, end_out).
template <class T>
struct Linear {
    const T *x, *weights, *bias;
    T* out;
    int64_t stride, in, outputs;
    int64_t next;  // how many outputs further the weights lie that a thread will probably need next

    void compute(Worker& worker, int64_t first_row, int64_t end_row, int64_t first_out, int64_t end_out) const {
        alignas(64) float sums[kRowBlock * kTaskOut];
        const int64_t row_blocks = (end_row - first_row + kRowBlock - 1) / kRowBlock;
        // One row block reads its weights once, as they lie, as fast as memory gives them. More of them take a part of the
        // depth at a time, for all outputs, and have the time to fetch what comes next.
        const int64_t parts = row_blocks > 1 ? (in + kPartDepth - 1) / kPartDepth : 1;
        const int64_t part = round_up((in + parts - 1) / parts, kDepth);
        const int64_t weight_lines = kOutBlock * kDepth * sizeof(T) / 64;
        Extra extra;
        extra.lines = row_blocks > 1 && first_out + next < outputs ? (weight_lines + row_blocks - 1) / row_blocks : 0;
        extra.ahead = reinterpret_cast<const char*>(weights + (first_out + next) * in);
        for (int64_t row = first_row; row < end_row; row += kRowBlock) {
            const int64_t height = least(kRowBlock, end_row - row);
            for (int64_t i = row; i < row + height; ++i)  // where results go, while they are computed
                for (int64_t first = first_out; first < end_out; first += kOutBlock)
                    __builtin_prefetch(out + i * outputs + first, 1);
            for (int64_t k = 0; k < in; k += part)
                for (int64_t first = first_out; first < end_out; first += kOutBlock) {
                    const int64_t depth = least(part, in - k);
                    extra.add = k > 0;
                    multiply(worker, x + row * stride + k, stride, weights + first * in + k * kLanes, in * kLanes,
                             depth, height, outputs - first > kLanes ? 2 : 1, sums + first - first_out, kTaskOut,
                             extra);
                    extra.ahead += extra.lines * 64 * (depth / kDepth);
                }
            for (int64_t i = 0; i < height; ++i)
                finish(sums + i * kTaskOut, bias ? bias + first_out : nullptr, out + (row + i) * outputs + first_out,
                       end_out - first_out);
        }
    }
};

template <class T>
static void linear(const Op& op, const Step& step, Team& team) {
    const int64_t rows = op.rows * step.tokens, in = padded<T>(op.n0), outputs = op.n1;
    if (rows == 0) return;
    const int64_t width = outputs >= 4 * team.threads() * kTaskOut ? kTaskOut : kOutBlock;
    int64_t stride;
    const T* x = pad_rows<T>(op, team, rows, &stride);
    const Linear<T> layer{x, static_cast<const T*>(op.b), static_cast<const T*>(op.c), static_cast<T*>(op.out),
                          stride, in, outputs, team.threads() * width};
    const int64_t most_rows = most(kRowBlock, kChunkBytes / int64_t(in * sizeof(T)) / kRowBlock * kRowBlock);
    const int64_t chunks = (rows + most_rows - 1) / most_rows, chunk = round_up((rows + chunks - 1) / chunks, kRowBlock);
    const int64_t blocks = (outputs + width - 1) / width;
    team.for_each(chunks * blocks, [&](int64_t task, Worker& worker) {
        const int64_t row = task / blocks * chunk, first = task % blocks * width;
        layer.compute(worker, row, least(rows, row + chunk), first, least(outputs, first + width));
    });
}

template <class T>
static void embed(const Op& op, const Step& step, Team& team) {
    const int64_t* ids = op.a ? static_cast<const int64_t*>(op.a) : step.token_ids;
    const T* weights = static_cast<const T*>(op.b);
    constexpr int64_t pair = sizeof(T) == sizeof(bf16) ? 2 : 1;
    const int64_t in = padded<T>(op.n0);
    team.for_each(op.rows * step.tokens, [&](int64_t token, Worker&) {
        const int64_t id = ids[token];
        if (id < 0 || id >= op.n1) return team.fail(kNoSuchToken);
        const T* row = weights + id / kLanes * kLanes * in + id % kLanes * pair;
        T* out = static_cast<T*>(op.out) + token * op.n0;
        for (int64_t i = 0; i < op.n0; i += kLanes) {
            T lanes[kLanes] = {};
            const int64_t count = least(kLanes, op.n0 - i);
            for (int64_t lane = 0; lane < count; ++lane)
                lanes[lane] = row[(i + lane) / pair * pair * kLanes + (i + lane) % pair];
            store_some(out + i, load(lanes) * op.f0, count);
        }
    });
}

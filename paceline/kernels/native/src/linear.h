// Linear layers and the embedding, over packed weights.

constexpr int64_t kChunkBytes = 1 << 20;  // of x that stay in a core's second cache while all weights pass by
constexpr int64_t kPartDepth = 320;       // along `in`, so many of a block of weights stay in its first cache
constexpr int64_t kTaskOut = 64;          // outputs of one task where there are many

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

// Weights of kOutBlock outputs, and those of the task that a thread will probably take next.
template <class T>
struct Panel {
    const T* weights;
    const char* next;  // null where there is none
    int64_t groups;    // of kLanes outputs
};

// Rows of padded length, and how they are cut into tasks.
template <class T>
struct Input {
    const T* x;
    int64_t stride, in, rows;
    int64_t chunk = rows_of_chunk(), chunks = (rows + chunk - 1) / chunk;

    int64_t rows_of_chunk() const {
        const int64_t most_rows = most(kRowBlock, kChunkBytes / int64_t(in * sizeof(T)) / kRowBlock * kRowBlock);
        const int64_t count = (rows + most_rows - 1) / most_rows;
        return round_up((rows + count - 1) / count, kRowBlock);
    }

    // Calls finish(row, sums) for the rows of a chunk; sums: fp32 [count][kOutBlock] of its products with the panels.
    template <class Finish>
    void multiply_chunk(Worker& worker, int64_t index, Panel<T>* panels, int64_t count, const Finish& finish) const {
        alignas(64) float sums[kRowBlock * kTaskOut];
        const int64_t begin = index * chunk, end = least(rows, begin + chunk);
        const int64_t row_blocks = (end - begin + kRowBlock - 1) / kRowBlock;
        // One row block reads its weights once, as they lie, as fast as memory gives them. More of them take a part of
        // the depth at a time, for all panels, and have the time to fetch what comes next.
        const int64_t parts = row_blocks > 1 ? (in + kPartDepth - 1) / kPartDepth : 1;
        const int64_t part = round_up((in + parts - 1) / parts, kDepth);
        const int64_t lines = (kOutBlock * kDepth * int64_t(sizeof(T)) / 64 + row_blocks - 1) / row_blocks;
        for (int64_t row = begin; row < end; row += kRowBlock) {
            const int64_t height = least(kRowBlock, end - row);
            for (int64_t k = 0; k < in; k += part)
                for (int64_t i = 0; i < count; ++i) {
                    Panel<T>& panel = panels[i];
                    const int64_t depth = least(part, in - k);
                    const Extra extra{k > 0, row_blocks > 1 && panel.next ? lines : 0, panel.next};
                    multiply(worker, x + row * stride + k, stride, panel.weights + k * kLanes, in * kLanes, depth,
                             height, panel.groups, sums + i * kOutBlock, kTaskOut, extra);
                    if (panel.next) panel.next += lines * 64 * (depth / kDepth);
                }
            if (!worker.may_write()) return;
            for (int64_t i = 0; i < height; ++i) finish(row + i, sums + i * kTaskOut);
        }
    }

    // Outputs [first, first + kOutBlock) of weights [outputs, in].
    Panel<T> panel(const void* packed, int64_t outputs, int64_t first, int64_t next) const {
        const T* weights = static_cast<const T*>(packed);
        const char* ahead = next < outputs ? reinterpret_cast<const char*>(weights + next * in) : nullptr;
        return {weights + first * in, ahead, outputs - first > kLanes ? 2 : 1};
    }
};

template <class T>
static Input<T> input_of(const Op& op, const Step& step, Team& team, int64_t in) {
    const int64_t rows = op.rows * step.tokens;
    int64_t stride;
    const T* x = pad_rows<T>(op, team, rows, in, &stride);
    return {x, stride, in, rows};
}

static int64_t itself(int64_t task) { return task; }

template <class T>
static void linear(const Op& op, const Step& step, Team& team) {
    if (op.rows * step.tokens == 0) return;
    const Input<T> input = input_of<T>(op, step, team, padded<T>(op.n0));
    const void* weights = op.b;
    const T* bias = static_cast<const T*>(op.c);
    T* out = static_cast<T*>(op.out);
    const int64_t outputs = op.n1;
    const int64_t width = outputs >= 4 * team.threads() * kTaskOut ? kTaskOut : kOutBlock;
    const int64_t blocks = (outputs + width - 1) / width, next = team.threads() * width;
    team.for_each_restartable(input.chunks * blocks, itself, [=](int64_t task, Worker& worker) {
        const int64_t first = task % blocks * width, count = least(width, outputs - first);
        Panel<T> panels[kTaskOut / kOutBlock];
        int64_t panel = 0;
        for (int64_t i = first; i < first + count; i += kOutBlock)
            panels[panel++] = input.panel(weights, outputs, i, i + next);
        input.multiply_chunk(worker, task / blocks, panels, panel, [&](int64_t row, const float* sums) {
            finish(sums, bias ? bias + first : nullptr, out + row * outputs + first, count);
        });
    });
}

// Two linear layers, each rounded as it would be alone, and what joins them: activation(gate, up).
template <class T, class Activation>
static void gated_linear(const Op& op, const Step& step, Team& team, const Activation& activation) {
    if (op.rows * step.tokens == 0) return;
    const Input<T> input = input_of<T>(op, step, team, padded<T>(op.n0));
    const void *gates = op.b, *ups = op.c;
    T* outs = static_cast<T*>(op.out);
    const int64_t outputs = op.n1, blocks = (outputs + kOutBlock - 1) / kOutBlock, next = team.threads() * kOutBlock;
    team.for_each_restartable(input.chunks * blocks, itself, [=](int64_t task, Worker& worker) {
        const int64_t first = task % blocks * kOutBlock, count = least(kOutBlock, outputs - first);
        Panel<T> panels[] = {input.panel(gates, outputs, first, first + next),
                             input.panel(ups, outputs, first, first + next)};
        input.multiply_chunk(worker, task / blocks, panels, 2, [&](int64_t row, const float* sums) {
            T* out = outs + row * outputs + first;
            for (int64_t i = 0; i < count; i += kLanes) {
                const f32x16 gate = round_to(out, load(sums + i)), up = round_to(out, load(sums + kOutBlock + i));
                store_some(out + i, activation(gate, up), count - i);
            }
        });
    });
}

template <class T>
static void linear_silu_and_mul(const Op& op, const Step& step, Team& team) {
    gated_linear<T>(op, step, team, silu_and_mul_lanes<T>);
}

template <class T>
static void linear_gelu_tanh_and_mul(const Op& op, const Step& step, Team& team) {
    gated_linear<T>(op, step, team, gelu_tanh_and_mul_lanes<T>);
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

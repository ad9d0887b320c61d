// Layers with the gated delta rule; see `RecurrentKernels` of ../../recurrence.py.

constexpr int64_t kDeltaVectors = 4;  // vectors of a state's rows that are computed together, as sums of their own
constexpr float kUnitEps = 1e-6f;

// Computes out = x * factor / |x| of `size` values.
template <class T>
static void to_length(const T* x, int64_t size, float factor, float* out) {
    f32x16 squares = {};
    for (int64_t i = 0; i < size; i += kLanes) {
        const f32x16 value = load_some(x + i, size - i);
        squares = fma(value, value, squares);
    }
    const float scale = factor / __builtin_sqrtf(sum_lanes(squares) + kUnitEps);
    for (int64_t i = 0; i < size; i += kLanes) store_some(out + i, load_some(x + i, size - i) * scale, size - i);
}

// Advances `count` vectors of each row of a state [rows, size] by one token, and writes them of out. A single vector may
// have only `left` columns.
template <int64_t count, class T, class Out>
static inline void delta_columns(const float* query, const float* key, const T* value, float kept, float written,
                                 int64_t rows, int64_t size, int64_t left, float* state, Out* out) {
    const int64_t lanes = count > 1 ? kLanes : left;
    f32x16 known[count] = {}, changes[count], sums[count] = {};
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i)
            known[i] = fma(load_some(state + row * size + i * kLanes, lanes), splat(key[row]), known[i]);
    for (int64_t i = 0; i < count; ++i)
        changes[i] = (load_some(value + i * kLanes, lanes) - known[i] * kept) * written;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i) {
            float* place = state + row * size + i * kLanes;
            const f32x16 now = fma(changes[i], splat(key[row]), load_some(place, lanes) * kept);
            store_some(place, now, lanes);
            sums[i] = fma(now, splat(query[row]), sums[i]);
        }
    for (int64_t i = 0; i < count; ++i) store_some(out + i * kLanes, sums[i], lanes);
}

// The sizes of a layer with the gated delta rule.
struct DeltaSizes {
    int64_t heads, key_heads, key_dim, value_dim;

    explicit DeltaSizes(const Op& op)
        : heads(op.cache.kv_heads), key_heads(op.n1), key_dim(op.cache.head_dim), value_dim(op.n0) {}
    int64_t keys() const { return key_heads * key_dim; }
    int64_t row() const { return 2 * keys() + heads * value_dim; }
    int64_t state() const { return key_dim * value_dim; }
};

// Computes one token of one head: advances its state and writes out [value_dim]. `x` is the token's row for all heads,
// and `scratch` has room for 2 * key_dim.
template <class T, class Out>
static void delta_token(const DeltaSizes& sizes, int64_t head, const T* x, float gate, float time_step, float rate,
                        float* scratch, float* state, Out* out) {
    const int64_t key_dim = sizes.key_dim, size = sizes.value_dim;
    const T* query = x + head / (sizes.heads / sizes.key_heads) * key_dim;
    const T* value = x + 2 * sizes.keys() + head * size;
    to_length(query, key_dim, 1.0f / __builtin_sqrtf(static_cast<float>(key_dim)), scratch);
    to_length(query + sizes.keys(), key_dim, 1.0f, scratch + key_dim);
    const float small = __builtin_log1pf(__builtin_expf(-__builtin_fabsf(time_step)));
    const float kept = __builtin_expf(rate * (__builtin_fmaxf(time_step, 0.0f) + small));
    const float written = 1.0f / (1.0f + __builtin_expf(-gate));
    int64_t at = 0;
    for (; at + kDeltaVectors * kLanes <= size; at += kDeltaVectors * kLanes)
        delta_columns<kDeltaVectors>(scratch, scratch + key_dim, value + at, kept, written, key_dim, size, size - at,
                                     state + at, out + at);
    for (; at < size; at += kLanes)
        delta_columns<1>(scratch, scratch + key_dim, value + at, kept, written, key_dim, size, size - at, state + at,
                         out + at);
}

template <class T>
static void gated_delta_rule(const Op& op, const Step& step, Team& team) {
    const DeltaSizes sizes(op);
    const int64_t heads = sizes.heads, row = sizes.row(), width = row + 2 * heads, elements = sizes.state();
    const T *x = static_cast<const T*>(op.a), *gates = static_cast<const T*>(op.b);
    const T* time_steps = static_cast<const T*>(op.c);
    const float* rates = static_cast<const float*>(op.d);
    T* out = static_cast<T*>(op.out);
    recur(
        op, step, team, heads, op.n2, width,
        [&](const Recurrence& own, int64_t head, Worker& worker) {
            const int64_t floats = elements + 2 * sizes.key_dim + sizes.value_dim;
            float* spare = static_cast<float*>(worker.scratch.take(floats * sizeof(float)));
            float *scratch = spare + elements, *unread = scratch + 2 * sizes.key_dim;
            const float rate = rates[head], bias = rates[heads + head];
            const auto replay = [&](const float* inputs, float* state) {
                const float time_step = inputs[row + heads + head] + bias;
                delta_token(sizes, head, inputs, inputs[row + head], time_step, rate, scratch, state, unread);
            };
            const auto compute = [&](int64_t token, float* state) {
                const float gate = load_some(gates + token * heads + head, 1)[0];
                const float time_step = load_some(time_steps + token * heads + head, 1)[0] + bias;
                delta_token(sizes, head, x + token * row, gate, time_step, rate, scratch, state,
                            out + (token * heads + head) * sizes.value_dim);
            };
            advance_state(own, width, head * elements, elements, spare, replay, compute);
        },
        [&](int64_t token, float* inputs) {
            widen_row(x + token * row, row, inputs);
            widen_row(gates + token * heads, heads, inputs + row);
            widen_row(time_steps + token * heads, heads, inputs + row + heads);
        });
}

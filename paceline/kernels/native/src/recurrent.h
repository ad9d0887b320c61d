// Layers with a state for each context; see `LayerState` of ../../interface.py. Each request is computed token by
// token, so that no result depends on where a chunk begins.

constexpr int64_t kMostTaps = 16;
constexpr int64_t kConvChannels = 64;  // channels of one task

// The tokens of one request, and the places of their states.
struct Recurrence {
    const Group& group;
    const Cache& cache;
    const int64_t request, begin, end, first_position;

    Recurrence(const Op& op, const Step& step, int64_t request)
        : group(step.groups[op.group]), cache(op.cache), request(request), begin(step.query_start[request]),
          end(step.query_start[request + 1]), first_position(step.context_len[request] - (end - begin)) {}

    int64_t slot_of(int64_t position) const {
        const int64_t block = position / group.block_tokens;
        return block < group.table_width ? group.tables[request * group.table_width + block] : -1;
    }
    bool has_slot(int64_t position) const {
        const int64_t slot = slot_of(position);
        return 0 <= slot && slot < cache.slots;
    }

    // Returns the state after the token at this position.
    float* behind(int64_t position) const {
        return static_cast<float*>(cache.keys) + slot_of(position) * cache.slot_stride;
    }

    // Returns whether the block of the state before the first token and the blocks of the tokens have valid slots.
    bool is_sound() const {
        const int64_t last = first_position + (end - begin) - 1;
        for (int64_t position = most(0, first_position - 1); position < last; position += group.block_tokens)
            if (!has_slot(position)) return false;
        return has_slot(last);
    }

    bool begins_block(int64_t token) const { return (first_position + token - begin) % group.block_tokens == 0; }
};

// Calls body(recurrence, part, worker) for every request that has tokens, and each of its parts.
template <class Body>
static void for_each_recurrence(const Op& op, const Step& step, Team& team, int64_t parts, const Body& body) {
    team.for_each(step.requests * parts, [&](int64_t task, Worker& worker) {
        const Recurrence own(op, step, task / parts);
        if (own.begin == own.end) return;
        if (!own.is_sound()) return team.fail(kNoSuchSlot);
        body(own, task % parts, worker);
    });
}

template <class T>
static void causal_conv(const Op& op, const Step& step, Team& team) {
    const int64_t channels = op.n0, taps = op.n1;
    const T* weight = static_cast<const T*>(op.b);
    const T* bias = static_cast<const T*>(op.c);
    const int64_t parts = (channels + kConvChannels - 1) / kConvChannels;
    for_each_recurrence(op, step, team, parts, [&](const Recurrence& own, int64_t part, Worker&) {
        for (int64_t at = part * kConvChannels; at < least(channels, (part + 1) * kConvChannels); at += kLanes) {
            const int64_t count = channels - at;
            f32x16 seen[kMostTaps] = {}, factors[kMostTaps];
            for (int64_t tap = 0; tap < taps; ++tap) factors[tap] = load_some(weight + tap * channels + at, count);
            const f32x16 offset = bias ? load_some(bias + at, count) : f32x16{};
            if (own.first_position) {
                const float* before = own.behind(own.first_position - 1);
                for (int64_t tap = 0; tap < taps - 1; ++tap) seen[tap] = load_some(before + tap * channels + at, count);
            }
            for (int64_t token = own.begin; token < own.end; ++token) {
                seen[taps - 1] = load_some(static_cast<const T*>(op.a) + token * channels + at, count);
                f32x16 sum = offset;
                for (int64_t tap = 0; tap < taps; ++tap) sum = fma(factors[tap], seen[tap], sum);
                store_some(static_cast<T*>(op.out) + token * channels + at, sum * reciprocal(1.0f + exp(-sum)), count);
                for (int64_t tap = 1; tap < taps; ++tap) seen[tap - 1] = seen[tap];
                if (token + 1 < own.end && !own.begins_block(token + 1)) continue;
                float* behind = own.behind(own.first_position + token - own.begin);
                for (int64_t tap = 0; tap < taps - 1; ++tap) store_some(behind + tap * channels + at, seen[tap], count);
            }
        }
    });
}

constexpr int64_t kScanRows = 4;  // rows of a state that are computed together, so that sums do not wait for each other

// Advances rows [0, count) of a state [rows, size] by one token. sums[i] becomes the dot product of row i and c.
template <int64_t count>
static inline void scan_rows(const float* added, const float* b, const float* c, float kept, int64_t size, float* state,
                             float* sums) {
    f32x16 sum[count] = {};
    for (int64_t n = 0; n < size; n += kLanes) {
        const f32x16 b_lanes = load_some(b + n, size - n), c_lanes = load_some(c + n, size - n);
        for (int64_t i = 0; i < count; ++i) {
            float* row = state + i * size + n;
            const f32x16 now = fma(load_some(row, size - n), splat(kept), added[i] * b_lanes);
            store_some(row, now, size - n);
            sum[i] = fma(now, c_lanes, sum[i]);
        }
    }
    for (int64_t i = 0; i < count; ++i) sums[i] = sum_lanes(sum[i]);
}

// Computes one token of one head: advances state [head_dim, size] and writes out [head_dim].
template <class T>
static void scan_token(const T* inputs, const float* b, const float* c, float step, float kept, float skip,
                       int64_t head_dim, int64_t size, float* state, T* out) {
    for (int64_t first = 0; first < head_dim; first += kLanes) {
        const int64_t count = least(kLanes, head_dim - first);
        const f32x16 input = load_some(inputs + first, count);
        float added[kLanes], sums[kLanes] = {};
        store(added, input * step);
        int64_t i = 0;
        for (; i + kScanRows <= count; i += kScanRows, state += kScanRows * size)
            scan_rows<kScanRows>(added + i, b, c, kept, size, state, sums + i);
        for (; i < count; ++i, state += size) scan_rows<1>(added + i, b, c, kept, size, state, sums + i);
        store_some(out + first, load(sums) + input * skip, count);
    }
}

// Converts the first `count` values of a row to fp32.
template <class T>
static void widen_row(const T* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += kLanes) store_some(to + i, load_some(from + i, count - i), count - i);
}

template <class T>
static void selective_scan(const Op& op, const Step& step, Team& team) {
    const int64_t heads = op.cache.kv_heads, head_dim = op.cache.head_dim, size = op.n0;
    const int64_t inner = heads * head_dim, row = inner + 2 * size;
    const float* rates = static_cast<const float*>(op.c);
    for_each_recurrence(op, step, team, heads, [&](const Recurrence& own, int64_t head, Worker& worker) {
        float* b_and_c = static_cast<float*>(worker.scratch.take(2 * size * sizeof(float)));
        const float decay = rates[head], bias = rates[heads + head], skip = rates[2 * heads + head];
        const size_t bytes = head_dim * size * sizeof(float);
        float* state = own.first_position ? own.behind(own.first_position - 1) + head * head_dim * size : nullptr;
        for (int64_t token = own.begin; token < own.end; ++token) {
            if (!state || own.begins_block(token)) {
                // The previous block is full, and others may read it. So this block begins with a copy of its state.
                float* next = own.behind(own.first_position + token - own.begin) + head * head_dim * size;
                if (state)
                    memcpy(next, state, bytes);
                else
                    memset(next, 0, bytes);
                state = next;
            }
            const T* x = static_cast<const T*>(op.a) + token * row;
            const f32x16 raw = load_some(static_cast<const T*>(op.b) + token * heads + head, 1) + bias;
            const float time_step = __builtin_fmaxf(raw[0], 0.0f) + __builtin_log1pf(__builtin_expf(-__builtin_fabsf(raw[0])));
            widen_row(x + inner, 2 * size, b_and_c);
            scan_token(x + head * head_dim, b_and_c, b_and_c + size, time_step, __builtin_expf(time_step * decay), skip,
                       head_dim, size, state, static_cast<T*>(op.out) + token * inner + head * head_dim);
        }
    });
}

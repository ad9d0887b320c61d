// Layers with a state for each context; see `LayerState` of ../../caches.py. Each request is computed token by
// token, so that no result depends on where a chunk begins.

constexpr int64_t kMostTaps = 16;
constexpr int64_t kConvChannels = 64;  // channels of one task

// The tokens of one request, and the places of their states.
struct Recurrence {
    const Group& group;
    const Cache& cache;
    const int64_t request, begin, end;
    const int64_t first, last;  // positions of the first token, and after the last token
    const int64_t final;        // number of tokens of the context that no later step takes back

    Recurrence(const Op& op, const Step& step, int64_t request)
        : group(step.groups[op.group]), cache(op.cache), request(request), begin(step.query_start[request]),
          end(step.query_start[request + 1]), first(step.context_len[request] - (end - begin)),
          last(step.context_len[request]), final(step.final_len[request]) {}

    int64_t slot_of(int64_t position) const {
        const int64_t block = position / group.block_tokens;
        return block < group.table_width ? group.tables[request * group.table_width + block] : -1;
    }
    bool has_slot(int64_t position) const {
        const int64_t slot = slot_of(position);
        return 0 <= slot && slot < cache.slots;
    }

    // Return the state and the pending inputs in the block of the token at this position.
    float* state_of(int64_t position) const {
        return static_cast<float*>(cache.keys) + slot_of(position) * cache.slot_stride;
    }
    float* pending_of(int64_t position) const {
        return static_cast<float*>(cache.values) + slot_of(position) * cache.slot_stride;
    }

    // Returns whether the block of the state before the first token and the blocks of the tokens have valid slots.
    bool is_sound() const {
        for (int64_t position = most(0, first - 1); position < last - 1; position += group.block_tokens)
            if (!has_slot(position)) return false;
        return has_slot(last - 1);
    }

    bool begins_block(int64_t position) const { return position % group.block_tokens == 0; }
    int64_t block_begin(int64_t position) const { return position - position % group.block_tokens; }
    int64_t block_end(int64_t position) const { return least(last, block_begin(position) + group.block_tokens); }

    // Returns the tokens that the state in the block before the first token includes.
    int64_t included() const { return block_begin(first - 1) + static_cast<int64_t>(*pending_of(first - 1)); }

    // Returns the tokens that the state in the block of this position includes after the step. The position is that of
    // the step's first token in the block.
    int64_t settled(int64_t position) const {
        if (final < first && !begins_block(position)) return included();
        return least(most(final, position), block_end(position));
    }

    // Returns whether a recurrence can begin at the first token, and its blocks have room for all pending inputs.
    bool can_go_back(int64_t room) const {
        if (first) {
            const float count = *pending_of(first - 1);
            if (!(count >= 0.0f && count <= static_cast<float>(group.block_tokens))) return false;
            if (included() > first || first - included() > room) return false;
        }
        for (int64_t position = first; position < last; position = block_end(position))
            if (block_end(position) - settled(position) > room) return false;
        return true;
    }
};

template <class T>
static void causal_conv(const Op& op, const Step& step, Team& team) {
    const int64_t channels = op.n0, taps = op.n1, rows = op.n2;
    const T* weight = static_cast<const T*>(op.b);
    const T* bias = static_cast<const T*>(op.c);
    const int64_t parts = (channels + kConvChannels - 1) / kConvChannels;
    team.for_each(step.requests * parts, [&](int64_t task, Worker&) {
        const Recurrence own(op, step, task / parts);
        const int64_t part = task % parts;
        if (own.begin == own.end) return;
        if (!own.is_sound()) return team.fail(kNoSuchSlot);
        for (int64_t at = part * kConvChannels; at < least(channels, (part + 1) * kConvChannels); at += kLanes) {
            const int64_t count = channels - at;
            f32x16 seen[kMostTaps] = {}, factors[kMostTaps];
            for (int64_t tap = 0; tap < taps; ++tap) factors[tap] = load_some(weight + tap * channels + at, count);
            const f32x16 offset = bias ? load_some(bias + at, count) : f32x16{};
            const auto row_of = [&](float* block, int64_t position) { return block + position % rows * channels + at; };
            for (int64_t before = most(0, own.first - taps + 1); before < own.first; ++before)
                seen[before - (own.first - taps + 1)] = load_some(row_of(own.state_of(own.first - 1), before), count);
            float* block = own.state_of(own.first);
            for (int64_t position = own.first; position < own.last; ++position) {
                if (own.begins_block(position)) {
                    block = own.state_of(position);
                    for (int64_t before = most(0, position - taps + 1); before < position; ++before)
                        store_some(row_of(block, before), seen[before - (position - taps + 1)], count);
                }
                const int64_t place = (own.begin + position - own.first) * channels + at;
                seen[taps - 1] = load_some(static_cast<const T*>(op.a) + place, count);
                if (rows) store_some(row_of(block, position), seen[taps - 1], count);
                f32x16 sum = offset;
                for (int64_t tap = 0; tap < taps; ++tap) sum = fma(factors[tap], seen[tap], sum);
                store_some(static_cast<T*>(op.out) + place, sum * reciprocal(1.0f + exp(-sum)), count);
                for (int64_t tap = 1; tap < taps; ++tap) seen[tap - 1] = seen[tap];
            }
        }
    });
}

// Computes the tokens of a request for one part of a state, `elements` at `offset`; see `RecurrentState`. The state is
// advanced by replay(inputs, state) over a pending token, and by compute(token, state), which also writes the token's
// result, over a token of the step. While it must not change in its block, it is advanced in `spare`.
template <class Replay, class Compute>
static void advance_state(const Recurrence& own, int64_t width, int64_t offset, int64_t elements, float* spare,
                          const Replay& replay, const Compute& compute) {
    const size_t bytes = elements * sizeof(float);
    float* state = nullptr;
    if (own.first) {
        const float* before = own.state_of(own.first - 1) + offset;
        state = own.final < own.first ? spare : own.state_of(own.first) + offset;
        if (state != before) memcpy(state, before, bytes);
        const float* inputs = own.pending_of(own.first - 1) + width;
        for (int64_t position = own.included(); position < own.first; ++position, inputs += width)
            replay(inputs, state);
    }
    for (int64_t position = own.first; position < own.last; ++position) {
        if (own.begins_block(position)) {
            float* block = own.state_of(position) + offset;
            if (!state)
                memset(block, 0, bytes);
            else if (state != block)
                memcpy(block, state, bytes);
            if (state != spare) state = block;
        }
        if (position >= own.final && state != spare) {
            memcpy(spare, state, bytes);
            state = spare;
        }
        compute(own.begin + position - own.first, state);
    }
}

// Notes how many tokens the states in a request's blocks include, and keeps the inputs of the tokens after them with
// keep(token, inputs). This comes after all parts of the state were advanced, because they read the inputs kept before.
template <class Keep>
static void keep_pending(const Recurrence& own, int64_t width, const Keep& keep) {
    for (int64_t position = own.first; position < own.last; position = own.block_end(position)) {
        float* pending = own.pending_of(position);
        const int64_t settled = own.settled(position);
        for (int64_t next = most(position, settled); next < own.block_end(position); ++next)
            keep(own.begin + next - own.first, pending + (1 + next - settled) * width);
        *pending = static_cast<float>(settled - own.block_begin(position));
    }
}

// Computes a recurrence of `parts` parts for each request. `room` is the number of pending inputs for which a block has
// room, each of `width` numbers. The rest is explained above; advance_part(own, part, worker) calls advance_state.
template <class AdvancePart, class Keep>
static void recur(const Op& op, const Step& step, Team& team, int64_t parts, int64_t room, int64_t width,
                  const AdvancePart& advance_part, const Keep& keep) {
    bool keeps = false;
    for (int64_t request = 0; request < step.requests; ++request) {
        const Recurrence own(op, step, request);
        if (own.begin == own.end) continue;
        if (!own.is_sound()) return team.fail(kNoSuchSlot);
        if (!own.can_go_back(room)) return team.fail(kNoSuchState);
        keeps |= own.final < own.last;
    }
    team.for_each(step.requests * parts, [&](int64_t task, Worker& worker) {
        const Recurrence own(op, step, task / parts);
        if (own.begin != own.end) advance_part(own, task % parts, worker);
    });
    const auto keep_one = [&](int64_t request) { keep_pending(Recurrence(op, step, request), width, keep); };
    if (keeps) {
        team.for_each(step.requests, [&](int64_t request, Worker&) { keep_one(request); });
    } else {  // only one number for each block, which is less than it costs to call other threads
        for (int64_t request = 0; request < step.requests; ++request) keep_one(request);
    }
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
    const int64_t inner = heads * head_dim, row = inner + 2 * size, width = row + heads;
    const float* rates = static_cast<const float*>(op.c);
    const T *x = static_cast<const T*>(op.a), *time_steps = static_cast<const T*>(op.b);
    T* out = static_cast<T*>(op.out);
    recur(
        op, step, team, heads, op.n1, width,
        [&](const Recurrence& own, int64_t head, Worker& worker) {
            const int64_t elements = head_dim * size;
            float* spare = static_cast<float*>(worker.scratch.take((elements + 2 * size + head_dim) * sizeof(float)));
            float *b_and_c = spare + elements, *unread = b_and_c + 2 * size;
            const float decay = rates[head], bias = rates[heads + head], skip = rates[2 * heads + head];
            const auto scan = [&](const auto* inputs, const float* b, float raw, float* state, auto* result) {
                const float small = __builtin_log1pf(__builtin_expf(-__builtin_fabsf(raw)));
                const float time_step = __builtin_fmaxf(raw, 0.0f) + small;
                scan_token(inputs + head * head_dim, b, b + size, time_step, __builtin_expf(time_step * decay), skip,
                           head_dim, size, state, result);
            };
            const auto replay = [&](const float* inputs, float* state) {
                scan(inputs, inputs + inner, inputs[row + head] + bias, state, unread);
            };
            const auto compute = [&](int64_t token, float* state) {
                widen_row(x + token * row + inner, 2 * size, b_and_c);
                const float raw = load_some(time_steps + token * heads + head, 1)[0] + bias;
                scan(x + token * row, b_and_c, raw, state, out + token * inner + head * head_dim);
            };
            advance_state(own, width, head * elements, elements, spare, replay, compute);
        },
        [&](int64_t token, float* inputs) {
            widen_row(x + token * row, row, inputs);
            widen_row(time_steps + token * heads, heads, inputs + row);
        });
}

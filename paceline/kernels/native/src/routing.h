// Layers with experts: router logits, and the choice of each token's experts.

// A linear layer with results in fp32 that are not rounded.
template <class T, class Matrix>
static void wide_layer(const Op& op, const Step& step, Team& team) {
    if (op.rows * step.tokens == 0) return;
    const auto input = Matrix::input(op, step, team, Matrix::columns(op));
    const Matrix matrix = Matrix::of(op.b, op);
    const T* bias = static_cast<const T*>(op.c);
    float* outs = static_cast<float*>(op.out);
    const int64_t outputs = op.n1, blocks = (outputs + kOutBlock - 1) / kOutBlock;
    team.for_each_restartable(input.chunks * blocks, itself, [=](int64_t task, Worker& worker) {
        const int64_t first = task % blocks * kOutBlock, count = least(kOutBlock, outputs - first);
        const Slice<Matrix> slice{&matrix, first};
        Matrix::multiply_slices(input, worker, task / blocks, &slice, 1, [&](int64_t row, const float* sums) {
            float* out = outs + row * outputs + first;
            for (int64_t i = 0; i < count; i += kLanes) {
                f32x16 value = load(sums + i);
                if (bias) value += load_some(bias + first + i, count - i);
                store_some(out + i, value, count - i);
            }
        });
    });
}

template <class T>
static void router_logits(const Op& op, const Step& step, Team& team) {
    by_form<T>(op, [&](auto form) { wide_layer<T, typename decltype(form)::Matrix>(op, step, team); });
}

// The choice of one token's experts. All arrays have one element for each expert.
struct Choice {
    const Op& op;
    float *scores, *wanted;
    uint8_t* taken;  // whether an expert cannot be chosen any more

    Choice(const Op& op, Scratch& scratch) : op(op) {
        const int64_t size = round_up(op.n0, kLanes);
        scores = static_cast<float*>(scratch.take(size * (2 * sizeof(float) + 1)));
        wanted = scores + size;
        taken = reinterpret_cast<uint8_t*>(wanted + size);
    }

    // Turns logits into scores.
    void score(const float* logits) {
        const int64_t experts = op.n0;
        f32x16 largest = splat(-__builtin_inff()), sum = {};
        for (int64_t i = 0; i < experts; ++i) scores[i] = logits[i];
        for (int64_t i = experts; i % kLanes; ++i) scores[i] = -__builtin_inff();
        const bool sigmoid = op.format & kScoresSigmoid;
        if (!sigmoid)
            for (int64_t i = 0; i < experts; i += kLanes) largest = max(load(scores + i), largest);
        const float top = max_lane(largest);
        for (int64_t i = 0; i < experts; i += kLanes) {
            const f32x16 value = load(scores + i);
            store(scores + i, sigmoid ? 1.0f / (1.0f + exp(-value)) : exp(value - top));
        }
        if (sigmoid) return;
        for (int64_t i = 0; i < experts; i += kLanes) sum += load_some(scores + i, experts - i);
        const float total = sum_lanes(sum);
        for (int64_t i = 0; i < experts; i += kLanes) store(scores + i, load(scores + i) / total);
    }

    // Returns the first of the best among [0, count) that are not taken, and takes it.
    int64_t take_best(const float* values, int64_t count) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; ++i)
            if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
        taken[best] = 1;
        return best;
    }

    // Takes all experts outside of the best groups.
    void take_other_groups() {
        const int64_t groups = op.n2, size = op.n0 / groups;
        alignas(64) float best[kMostGroups];
        for (int64_t group = 0; group < groups; ++group) {
            float first = -__builtin_inff(), second = first;
            for (int64_t i = group * size; i < (group + 1) * size; ++i) {
                if (wanted[i] > first) second = first, first = wanted[i];
                else if (wanted[i] > second) second = wanted[i];
            }
            best[group] = op.format & kScoreOfTwo ? first + second : first;
        }
        bool chosen[kMostGroups] = {};
        memset(taken, 0, groups);
        for (int64_t i = 0; i < op.cache.slots; ++i) chosen[take_best(best, groups)] = true;
        for (int64_t i = 0; i < op.n0; ++i) taken[i] = !chosen[i / size];
    }

    void operator()(const float* logits, int64_t* ids, float* weights) {
        const int64_t experts = op.n0, top_k = op.n1;
        const auto* corrections = static_cast<const float*>(op.b);
        score(logits);
        for (int64_t i = 0; i < experts; ++i) wanted[i] = corrections ? scores[i] + corrections[i] : scores[i];
        memset(taken, 0, experts);
        if (op.n2 > 1) take_other_groups();
        float sum = 0.0f;
        for (int64_t i = 0; i < top_k; ++i) {
            ids[i] = take_best(wanted, experts);
            weights[i] = scores[ids[i]];
            sum += weights[i];
        }
        const float divisor = op.format & kNormalize ? sum + 1e-20f : 1.0f;
        for (int64_t i = 0; i < top_k; ++i) {
            weights[i] = weights[i] / divisor * op.f0;
            if (corrections) weights[i] *= corrections[experts + ids[i]];
        }
    }
};

template <class T>
static void choose_experts(const Op& op, const Step& step, Team& team) {
    const int64_t tokens = op.rows * step.tokens, experts = op.n0, top_k = op.n1;
    const int64_t rows = most(1, kTaskElements / (experts * most(1, top_k)));  // rows of one task
    team.for_each((tokens + rows - 1) / rows, [&](int64_t task, Worker& worker) {
        Choice choose(op, worker.scratch);
        for (int64_t row = task * rows; row < least(tokens, (task + 1) * rows); ++row)
            choose(static_cast<const float*>(op.a) + row * experts,
                   static_cast<int64_t*>(const_cast<void*>(op.c)) + row * top_k,
                   static_cast<float*>(op.out) + row * top_k);
    });
}

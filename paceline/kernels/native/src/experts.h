// Layers with experts: the weighted sum of the results of each token's experts.
//
// The pairs of a token and one of its experts are sorted by expert. So all rows of an expert are multiplied together, and
// only the weights of experts in use are read.

constexpr int64_t kMostPairs = 8192;  // pairs that are computed together, which bounds the memory they take

// The weights of an expert: of gate, up and down.
struct Expert {
    const void* weights[3];
    int64_t formats[3];
    const void* biases[3];
};

// Rows [begin, begin + rows) of the sorted pairs, which have the same expert.
struct Run {
    const Expert* expert;
    int64_t begin, rows;
};

// The pairs of some tokens, and the memory for their values.
template <class T>
struct Pairs {
    int64_t tokens, top_k, count, hidden, inner, runs = 0;
    Run* run;          // [runs]
    int64_t* ends;     // [2 * runs]: number of tasks up to each matrix
    int64_t* sorted;   // [count]: the pair of each row
    int64_t* row_of;   // [count]: the row of each pair
    char* rows;        // values of the rows in the form that products need
    T *gate, *up, *out;
    int64_t bytes = 0;

    // With null as memory, only `bytes` counts.
    Pairs(const Op& op, int64_t tokens, char* memory)
        : tokens(tokens), top_k(op.cache.kv_heads), count(tokens * top_k), hidden(op.n0), inner(op.n1) {
        const int64_t most_runs = least(op.cache.slots, count);
        const auto take = [&](int64_t size) {
            const auto own = reinterpret_cast<uintptr_t>(memory) + bytes;  // an integer, because memory may be null
            bytes += round_up(size, 64);
            return reinterpret_cast<char*>(own);
        };
        run = reinterpret_cast<Run*>(take(most_runs * sizeof(Run)));
        ends = reinterpret_cast<int64_t*>(take(2 * most_runs * sizeof(int64_t)));
        sorted = reinterpret_cast<int64_t*>(take(count * sizeof(int64_t)));
        row_of = reinterpret_cast<int64_t*>(take(count * sizeof(int64_t)));
        gate = reinterpret_cast<T*>(take(count * inner * sizeof(T)));
        up = reinterpret_cast<T*>(take(count * inner * sizeof(T)));
        out = reinterpret_cast<T*>(take(count * hidden * sizeof(T)));
        // Twice: as rows and as columns. Each run's columns have 64 bytes more.
        rows = take(2 * count * round_up(most(hidden, inner), 2 * kDepth) * sizeof(Left<T>) + 64 * most_runs);
    }

    // Sorts the pairs by expert. Returns false if an expert does not exist.
    bool sort(const Expert* experts, int64_t expert_count, const int64_t* ids, int64_t* starts) {
        memset(starts, 0, (expert_count + 1) * sizeof(int64_t));
        for (int64_t pair = 0; pair < count; ++pair) {
            if (ids[pair] < 0 || ids[pair] >= expert_count) return false;
            ++starts[ids[pair] + 1];
        }
        for (int64_t expert = 0; expert < expert_count; ++expert) {
            const int64_t own = starts[expert + 1], begin = starts[expert];
            starts[expert + 1] += begin;
            if (own) run[runs++] = {experts + expert, begin, own};
        }
        for (int64_t pair = 0; pair < count; ++pair) {
            const int64_t row = starts[ids[pair]]++;
            sorted[row] = pair;
            row_of[pair] = row;
        }
        return true;
    }
};

// The rows of all pairs as the input of products; see `Input` and `IntegerInput`.
template <class In>
struct RowsFor;

template <class T>
struct RowsFor<Input<T>> {
    using X = Left<T>;
    X *x, *columns;
    int64_t in;

    RowsFor(char* memory, int64_t count, int64_t in) : x(reinterpret_cast<X*>(memory)), columns(x + count * in), in(in) {}

    void fill(int64_t row, const T* from, int64_t count) const {
        copy_values(from, count, x + row * in);
        memset(x + row * in + count, 0, (in - count) * sizeof(X));
    }
    X* columns_of(const Run& run, int64_t index) const { return columns + run.begin * in + index * (64 / sizeof(X)); }
    void pack(const Run& run, int64_t index, const Columns& how) const {
        if (run.rows == 1 || run.rows > how.most) return;
        for (int64_t row = 0; row < run.rows; row += how.block)
            pack_columns(x + (run.begin + row) * in, in, in, least(how.block, run.rows - row),
                         columns_of(run, index) + row * in);
    }
    Input<T> of(const Run& run, int64_t index, const Columns& how) const {
        const X* own = x + run.begin * in;
        const X* packed = run.rows > how.most ? nullptr : run.rows == 1 ? own : columns_of(run, index);
        return {Chunks(run.rows, in * sizeof(X)), own, packed, in, in};
    }
};

#ifdef PACELINE_INTEGER_PRODUCTS
template <>
struct RowsFor<IntegerInput> {
    int16_t* x;
    BlockOfX* blocks;
    int64_t in;

    RowsFor(char* memory, int64_t count, int64_t in)
        : x(reinterpret_cast<int16_t*>(memory)), blocks(reinterpret_cast<BlockOfX*>(x + count * in)), in(in) {}

    void fill(int64_t row, const bf16* from, int64_t count) const {
        round_row(from, count, x + row * in, blocks + row * (in / kDepth));
    }
    void pack(const Run&, int64_t, const Columns&) const {}
    IntegerInput of(const Run& run, int64_t, const Columns&) const {
        return {Chunks(run.rows, in * sizeof(int16_t)), x + run.begin * in, blocks + run.begin * (in / kDepth), in};
    }
};
#endif

template <class B>
struct RowsFor<ByteInput<B>> {
    Left<B>* x;
    float* scales;
    int64_t in;

    RowsFor(char* memory, int64_t count, int64_t in)
        : x(reinterpret_cast<Left<B>*>(memory)), scales(reinterpret_cast<float*>(x + count * in)), in(in) {}

    template <class T>
    void fill(int64_t row, const T* from, int64_t count) const {
        scales[row] = round_to_bytes(from, count, 2 * in, 0.0f, x + row * in);
    }
    void pack(const Run&, int64_t, const Columns&) const {}
    ByteInput<B> of(const Run& run, int64_t, const Columns&) const {
        return {{Chunks(run.rows, in * sizeof(Left<B>)), x + run.begin * in, nullptr, in, in}, scales + run.begin};
    }
};

// Products of all rows with `matrices` matrices of each row's expert, from matrix `first` on: outs[matrix][row].
template <class T>
struct ExpertProducts {
    int64_t first, matrices, in, outputs;
    T* outs[2];

    static constexpr int kForms = 5;
    static int form_of(int64_t format) {
        return format & kFormatByteInput ? 4 : format == kFormatCompressed ? 2 : !format ? 0 : must_unpack(format) ? 3 : 1;
    }

    Op op_of(const Expert& expert, int64_t matrix) const {
        Op op = {};
        op.n0 = in, op.n1 = outputs, op.format = expert.formats[first + matrix];
        return op;
    }

    // Computes the products with all matrices of one form. row_at(row): the values of a row.
    template <class Matrix, class RowAt>
    void multiply_form(const Pairs<T>& pairs, int form, Team& team, const RowAt& row_at) const {
        using In = decltype(Matrix::input(std::declval<Op>(), std::declval<Step>(), team, std::declval<Columns>()));
        const RowsFor<In> rows(pairs.rows, pairs.count, Matrix::depth(in));
        for_each_row(team, pairs.count, rows.in, [&](int64_t row) { rows.fill(row, row_at(row), in); });
        const Columns how = columns_of<Matrix>(pairs, form);
        if (how.most)
            team.for_each(pairs.runs, [&](int64_t index, Worker&) { rows.pack(pairs.run[index], index, how); });

        const ExpertProducts own = *this;
        const int64_t wide = pairs.runs * matrices * outputs >= 4 * team.threads() * Matrix::kMostOut;
        const int64_t width = wide ? Matrix::kMostOut : kOutBlock, blocks = (outputs + width - 1) / width;
        int64_t tasks = 0;
        for (int64_t i = 0; i < pairs.runs * matrices; ++i) {
            const Run& run = pairs.run[i / matrices];
            if (form_of(run.expert->formats[first + i % matrices]) == form) tasks += rows.of(run, 0, how).chunks * blocks;
            pairs.ends[i] = tasks;
        }
        struct Found {
            In input;
            Matrix matrix;
            const T* bias;
            T* out;
            int64_t chunk, first, count;
        };
        const auto find = [&](int64_t task) {
            int64_t i = 0, end = pairs.runs * matrices - 1;  // the first matrix with pairs.ends[i] > task
            while (i < end) {
                const int64_t middle = (i + end) / 2;
                if (pairs.ends[middle] > task) end = middle;
                else i = middle + 1;
            }
            if (i) task -= pairs.ends[i - 1];
            const int64_t index = i / matrices, which = i % matrices, begin = task % blocks * width;
            const Run& run = pairs.run[index];
            const Expert& expert = *run.expert;
            return Found{rows.of(run, index, how), Matrix::of(expert.weights[first + which], own.op_of(expert, which)),
                         static_cast<const T*>(expert.biases[first + which]), outs[which] + run.begin * outputs,
                         task / blocks, begin, least(width, outputs - begin)};
        };
        team.for_each_restartable(tasks, find, [outputs = outputs](const Found& own, Worker& worker) {
            Slice<Matrix> slices[kTaskOut / kOutBlock];
            int64_t slice = 0;
            for (int64_t i = 0; i < own.count; i += kOutBlock) slices[slice++] = {&own.matrix, own.first + i};
            const T* bias = own.bias ? own.bias + own.first : nullptr;
            Matrix::multiply_slices(own.input, worker, own.chunk, slices, slice, [&](int64_t row, const float* sums) {
                finish(sums, bias, own.out + row * outputs + own.first, own.count);
            });
        });
    }

    // Returns the column layout that any matrix of this form needs.
    template <class Matrix>
    Columns columns_of(const Pairs<T>& pairs, int form) const {
        Columns how{};
        for (int64_t i = 0; i < pairs.runs * matrices; ++i) {
            const Op op = op_of(*pairs.run[i / matrices].expert, i % matrices);
            if (form_of(op.format) == form && Matrix::columns(op).most) how = Matrix::columns(op);
        }
        return how;
    }

    // Computes all products. Nearly always, all matrices have one form.
    template <class RowAt>
    void multiply(const Pairs<T>& pairs, Team& team, const RowAt& row_at) const {
        for (int form = 0; form < kForms; ++form)
            for (int64_t i = 0; i < pairs.runs * matrices; ++i) {
                const Op op = op_of(*pairs.run[i / matrices].expert, i % matrices);
                if (form_of(op.format) != form) continue;
                by_form<T>(op, [&](auto own) {
                    multiply_form<typename decltype(own)::Matrix>(pairs, form, team, row_at);
                });
                break;
            }
    }
};

template <class T>
struct ClampedSwiglu {
    PACELINE_INLINED f32x16 operator()(const f32x16& gate, const f32x16& up) const {
        const f32x16 limit = splat(7.0f);
        const f32x16 low = -max(-gate, -limit), bounded = max(-max(-up, -limit), -limit);
        return low / (1.0f + exp(-1.702f * low)) * (bounded + 1.0f);
    }
};

// gate = activation(gate, up) for all pairs.
template <class T, class Activation>
static void activate(const Pairs<T>& pairs, Team& team, const Activation& activation) {
    for_each_row(team, pairs.count, pairs.inner, [&](int64_t row) {
        T* gate = pairs.gate + row * pairs.inner;
        const T* up = pairs.up + row * pairs.inner;
        for (int64_t i = 0; i < pairs.inner; i += kLanes) {
            const int64_t count = pairs.inner - i;
            store_some(gate + i, activation(load_some(gate + i, count), load_some(up + i, count)), count);
        }
    });
}

// Computes tokens [first, first + tokens).
template <class T>
static void experts_of(const Op& op, Team& team, int64_t first, int64_t tokens) {
    const int64_t expert_count = op.cache.slots, top_k = op.cache.kv_heads, hidden = op.n0, inner = op.n1;
    const int64_t* ids = static_cast<const int64_t*>(op.b) + first * top_k;
    const float* weights = static_cast<const float*>(op.c) + first * top_k;
    const T* x = static_cast<const T*>(op.a) + first * op.n2;
    T* outs = static_cast<T*>(op.out) + first * hidden;
    const int64_t bytes = Pairs<T>(op, tokens, nullptr).bytes, starts_bytes = (expert_count + 1) * sizeof(int64_t);
    char* memory = static_cast<char*>(team.shared(bytes + starts_bytes));
    Pairs<T> pairs(op, tokens, memory);
    auto* starts = reinterpret_cast<int64_t*>(memory + bytes);
    if (!pairs.sort(static_cast<const Expert*>(op.cache.keys), expert_count, ids, starts))
        return team.fail(kNoSuchExpert);

    const ExpertProducts<T> gate_and_up{0, 2, hidden, inner, {pairs.gate, pairs.up}};
    const ExpertProducts<T> down{2, 1, inner, hidden, {pairs.out, nullptr}};
    gate_and_up.multiply(pairs, team, [&](int64_t row) { return x + pairs.sorted[row] / top_k * op.n2; });
    if (op.format == kExpertSilu) activate(pairs, team, SiluAndMul<T>{});
    else if (op.format == kExpertGeluTanh) activate(pairs, team, GeluTanhAndMul<T>{});
    else activate(pairs, team, ClampedSwiglu<T>{});
    down.multiply(pairs, team, [&](int64_t row) { return pairs.gate + row * inner; });
    for_each_row(team, tokens, hidden * top_k, [&](int64_t token) {
        for (int64_t i = 0; i < hidden; i += kLanes) {
            f32x16 sum = {};
            for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair)
                sum = fma(load_some(pairs.out + pairs.row_of[pair] * hidden + i, hidden - i), splat(weights[pair]), sum);
            store_some(outs + token * hidden + i, sum, hidden - i);
        }
    });
}

template <class T>
static void experts(const Op& op, const Step& step, Team& team) {
    const int64_t tokens = op.rows * step.tokens, block = most(1, kMostPairs / op.cache.kv_heads);
    for (int64_t first = 0; first < tokens; first += block)
        experts_of<T>(op, team, first, least(block, tokens - first));
}

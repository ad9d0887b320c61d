// Linear layers and the embedding, over packed weights.

constexpr int64_t kChunkBytes = 1 << 20;   // bytes of x that stay in a core's L2 cache while all weights pass
constexpr int64_t kPanelBytes = 20 << 10;  // part of a block of weights that stays in the L1 cache
constexpr int64_t kTaskOut = 64;           // outputs of one task if there are many

// Returns x between bounds[0] and bounds[1]. NaN stays NaN.
static inline f32x16 clamp(const f32x16& x, const float* bounds) {
    const f32x16 raised = max(splat(bounds[0]), x), greatest = splat(bounds[1]);
    return select(greatest < raised, greatest, raised);
}

// bounds: of the results; null if there are none.
template <class T>
static inline void finish(const float* sums, const T* bias, T* out, int64_t count, const float* bounds = nullptr) {
    int64_t i = 0;
    if (!bias && !bounds)
        for (; i + kLanes <= count; i += kLanes) store(out + i, load(sums + i));
    for (; i < count; i += kLanes) {
        f32x16 value = load(sums + i);
        if (bias) value += load_some(bias + i, count - i);
        if (bounds) value = clamp(value, bounds);
        store_some(out + i, value, count - i);
    }
}

// Weights of kOutBlock outputs, and the weights that the thread will probably read next.
template <class T>
struct Panel {
    const T* weights;
    const char* next;  // null if there are none
    int64_t groups;    // groups of kLanes outputs
    bool comes_from_memory;
};

// The column layout of x, which some weights need for up to `most` rows of bf16: `block` rows at a time, each block
// [in / 2][rows of the block][2].
struct Columns {
    int64_t block, most;
};

// Rows of x, cut into chunks for tasks.
struct Chunks {
    int64_t rows, chunk, chunks;

    Chunks(int64_t rows_, int64_t row_bytes) : rows(rows_) {
        const int64_t most_rows = most(kRowBlock, kChunkBytes / row_bytes / kRowBlock * kRowBlock);
        const int64_t count = (rows + most_rows - 1) / most_rows;
        chunk = round_up((rows + count - 1) / count, kRowBlock);
        chunks = (rows + chunk - 1) / chunk;
    }
    int64_t begin_of(int64_t index) const { return index * chunk; }
    int64_t end_of(int64_t index) const { return least(rows, (index + 1) * chunk); }
};

// Rows of padded length for products with weights of type T.
template <class T>
struct Input : Chunks {
    const Left<T>* x;
    const Left<T>* columns;  // the same rows in the layout of `Columns`; null if the weights do not need it
    int64_t stride, in;

    // Calls finish(row, sums) for the rows of a chunk; sums: fp32 [count][kOutBlock], products of row and panels.
    template <class W, class Finish>
    void multiply_chunk(Worker& worker, int64_t index, Panel<W>* panels, int64_t count, const Finish& finish) const {
        alignas(64) float sums[kRowBlock * kTaskOut];
        const int64_t begin = begin_of(index), end = end_of(index);
        const int64_t row_blocks = (end - begin + kRowBlock - 1) / kRowBlock;
        // One row block reads its weights once, in the order of memory, as fast as memory delivers them. Several row
        // blocks take a part of the depth at a time, for all panels, and have time to prefetch the next weights.
        constexpr int64_t most_depth = kPanelBytes / (kOutBlock * int64_t(sizeof(W)));
        const int64_t parts = row_blocks > 1 ? (in + most_depth - 1) / most_depth : 1;
        const int64_t part = round_up((in + parts - 1) / parts, kDepth);
        const int64_t lines = (kOutBlock * kDepth * int64_t(sizeof(W)) / 64 + row_blocks - 1) / row_blocks;
        for (int64_t row = begin; row < end; row += kRowBlock) {
            const int64_t height = least(kRowBlock, end - row);
            for (int64_t k = 0; k < in; k += part)
                for (int64_t i = 0; i < count; ++i) {
                    Panel<W>& panel = panels[i];
                    const int64_t depth = least(part, in - k);
                    const Extra extra{k > 0, row_blocks > 1 && panel.next ? lines : 0, panel.next,
                                      panel.comes_from_memory};
                    multiply(worker, x + row * stride + k, stride, panel.weights + k * kLanes, in * kLanes, depth,
                             height, panel.groups, sums + i * kOutBlock, kTaskOut, extra);
                    if (panel.next) panel.next += lines * 64 * (depth / kDepth);
                }
            if (!worker.may_write()) return;
            for (int64_t i = 0; i < height; ++i) finish(row + i, sums + i * kTaskOut);
        }
    }
};

// Packs rows of x, `stride` apart, as [in / 2][rows][2]. in: a multiple of kDepth. Writes up to 64 bytes more.
template <class T>
static void pack_columns(const T* x, int64_t stride, int64_t in, int64_t rows, T* to) {
    for (int64_t k = 0; k < in; k += kDepth) {
        u32x16 square[kLanes] = {};
        for (int64_t row = 0; row < rows; ++row) square[row] = read<u32x16>(x + row * stride + k);
        transpose(square);
        for (int64_t i = 0; i < kLanes; ++i, to += 2 * rows) write(to, square[i]);
    }
}

// Copies the first `count` values of a row, converted if the types differ.
static inline void copy_values(const bf16* from, int64_t count, bf16* to) { memcpy(to, from, count * sizeof(bf16)); }
template <class T>
static inline void copy_values(const T* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += kLanes) store_some(to + i, load_some(from + i, count - i), count - i);
}

// The same, between bounds.
template <class T>
static inline void clamp_values(const T* from, int64_t count, const float* bounds, Left<T>* to) {
    for (int64_t i = 0; i < count; i += kLanes)
        store_some(to + i, clamp(load_some(from + i, count - i), bounds), count - i);
}

// Returns the rows of op.a with length `in`. If op.n0 is less, or if x has another type in products or has bounds, they
// are copies, padded with zeros.
template <class T>
static Input<T> input_of(const Op& op, const Step& step, Team& team, int64_t in, const Columns& columns) {
    using X = Left<T>;
    const int64_t rows = op.rows * step.tokens, count = op.n0, stride = op.n2;
    const float* bounds = static_cast<const float*>(op.d);
    const bool copies = in != count || sizeof(X) != sizeof(T) || bounds, packs = rows > 1 && rows <= columns.most;
    X* memory = copies || packs ? static_cast<X*>(team.shared(2 * rows * in * sizeof(X) + 64)) : nullptr;
    Input<T> input{Chunks(rows, in * sizeof(X)), reinterpret_cast<const X*>(op.a), nullptr, stride, in};
    if (copies) {
        const T* x = static_cast<const T*>(op.a);
        for_each_row(team, rows, in, [&](int64_t row) {
            if (bounds) clamp_values(x + row * stride, count, bounds, memory + row * in);
            else copy_values(x + row * stride, count, memory + row * in);
            memset(memory + row * in + count, 0, (in - count) * sizeof(X));
        });
        input.x = memory;
        input.stride = in;
    }
    if (columns.most && rows == 1) input.columns = input.x;
    if (packs) {
        for (int64_t row = 0; row < rows; row += columns.block)
            pack_columns(input.x + row * input.stride, input.stride, in, least(columns.block, rows - row),
                         memory + (rows + row) * in);
        input.columns = memory + rows * in;
    }
    return input;
}

static int64_t itself(int64_t task) { return task; }

// Outputs [first, first + kOutBlock) of a matrix.
template <class Matrix>
struct Slice {
    const Matrix* matrix;
    int64_t first;
};

// A matrix [outputs, in] in bf16 or fp32.
template <class T>
struct Packed {
    static constexpr int64_t kMostOut = kTaskOut;  // outputs of one task

    const T* weights;
    int64_t outputs;

    static Packed of(const void* data, const Op& op) { return {static_cast<const T*>(data), op.n1}; }
    static int64_t depth(int64_t in) { return padded<T>(in); }
    static Columns columns(const Op&) { return {}; }
    static Input<T> input(const Op& op, const Step& step, Team& team, const Columns& columns) {
        return input_of<T>(op, step, team, depth(op.n0), columns);
    }

    // Returns packed weights of the sixteen outputs from `first` on.
    const T* sixteen(int64_t first, int64_t in, Worker&) const { return weights + first * in; }

    // Calls finish(row, sums) for the rows of a chunk and up to kTaskOut outputs, in order.
    template <class Finish>
    static void multiply_slices(const Input<T>& input, Worker& worker, int64_t chunk, const Slice<Packed>* slices,
                                int64_t count, const Finish& finish) {
        Panel<T> panels[kTaskOut / kOutBlock];
        for (int64_t i = 0; i < count; ++i) {
            const Packed& own = *slices[i].matrix;
            const int64_t first = slices[i].first, width = slices[count - 1].first + kOutBlock - slices[0].first;
            const T* next = first + width < own.outputs ? own.weights + (first + width) * input.in : nullptr;
            panels[i] = {own.weights + first * input.in, reinterpret_cast<const char*>(next),
                         own.outputs - first > kLanes ? 2 : 1, true};
        }
        input.multiply_chunk(worker, chunk, panels, count, finish);
    }
};

// One linear layer, or several consecutive layers of the program with the same input.
template <class T, class Matrix>
static void linear_layers(const Op& op, const Step& step, Team& team) {
    if (op.rows * step.tokens == 0) return;
    Columns columns{};
    for (int64_t i = 0; i <= op.joined; ++i)
        if (const Columns own = Matrix::columns((&op)[i]); own.most) columns = own;
    const auto input = Matrix::input(op, step, team, columns);
    struct Layer {
        Matrix matrix;
        const T* bias;
        const float* bounds;
        T* out;
        int64_t outputs, width, end;  // end: number of output blocks of the layers up to this one
    };
    struct {
        Layer own[kMostJoined];
    } layers;
    int64_t blocks = 0;
    for (int64_t i = 0; i <= op.joined; ++i) {
        const Op& each = (&op)[i];
        const int64_t width = each.n1 >= 4 * team.threads() * Matrix::kMostOut ? Matrix::kMostOut : kOutBlock;
        blocks += (each.n1 + width - 1) / width;
        layers.own[i] = {Matrix::of(each.b, each), static_cast<const T*>(each.c),
                         each.d ? static_cast<const float*>(each.d) + 2 : nullptr, static_cast<T*>(each.out), each.n1,
                         width, blocks};
    }
    team.for_each_restartable(input.chunks * blocks, itself, [=](int64_t task, Worker& worker) {
        const Layer* layer = layers.own;
        int64_t block = task % blocks;
        for (; block >= layer->end; ++layer) {
        }
        if (layer != layers.own) block -= layer[-1].end;
        const int64_t first = block * layer->width, count = least(layer->width, layer->outputs - first);
        Slice<Matrix> slices[kTaskOut / kOutBlock];
        int64_t slice = 0;
        for (int64_t i = 0; i < count; i += kOutBlock) slices[slice++] = {&layer->matrix, first + i};
        Matrix::multiply_slices(input, worker, task / blocks, slices, slice, [&](int64_t row, const float* sums) {
            finish(sums, layer->bias ? layer->bias + first : nullptr, layer->out + row * layer->outputs + first, count,
                   layer->bounds);
        });
    });
}

// out = activation(gate, up) of two linear layers, each rounded as it would be by itself.
template <class T, class Matrix, class Activation>
static void gated_layers(const Op& op, const Step& step, Team& team, const Activation& activation) {
    if (op.rows * step.tokens == 0) return;
    const auto input = Matrix::input(op, step, team, Matrix::columns(op));
    const Matrix gates = Matrix::of(op.b, op), ups = Matrix::of(op.c, op);
    T* outs = static_cast<T*>(op.out);
    const int64_t outputs = op.n1, blocks = (outputs + kOutBlock - 1) / kOutBlock;
    team.for_each_restartable(input.chunks * blocks, itself, [=](int64_t task, Worker& worker) {
        const int64_t first = task % blocks * kOutBlock, count = least(kOutBlock, outputs - first);
        const Slice<Matrix> slices[] = {{&gates, first}, {&ups, first}};
        Matrix::multiply_slices(input, worker, task / blocks, slices, 2, [&](int64_t row, const float* sums) {
            T* out = outs + row * outputs + first;
            for (int64_t i = 0; i < count; i += kLanes) {
                const f32x16 gate = round_to(out, load(sums + i)), up = round_to(out, load(sums + kOutBlock + i));
                store_some(out + i, activation(gate, up), count - i);
            }
        });
    });
}

// to[size] = row `lane` of sixteen packed rows, times the factor.
template <class W, class T>
static void copy_row(const W* packed, int64_t lane, int64_t size, float factor, T* to) {
    constexpr int64_t pair = sizeof(W) == sizeof(bf16) ? 2 : 1;
    const W* row = packed + lane * pair;
    for (int64_t i = 0; i < size; i += kLanes) {
        W lanes[kLanes] = {};
        const int64_t count = least(kLanes, size - i);
        for (int64_t k = 0; k < count; ++k) lanes[k] = row[(i + k) / pair * pair * kLanes + (i + k) % pair];
        store_some(to + i, load(lanes) * factor, count);
    }
}

// The embedding: copies rows of the matrix.
template <class T, class Matrix>
static void embed_tokens(const Op& op, const Step& step, Team& team) {
    const int64_t* ids = op.a ? static_cast<const int64_t*>(op.a) : step.token_ids;
    const Matrix matrix = Matrix::of(op.b, op);
    T* outs = static_cast<T*>(op.out);
    team.for_each(op.rows * step.tokens, [&](int64_t token, Worker& worker) {
        const int64_t id = ids[token];
        if (id < 0 || id >= op.n1) return team.fail(kNoSuchToken);
        const int64_t lane = id % kLanes;
        const auto* packed = matrix.sixteen(id - lane, Matrix::depth(op.n0), worker);
        copy_row(packed, lane, op.n0, op.f0, outs + token * op.n0);
    });
}

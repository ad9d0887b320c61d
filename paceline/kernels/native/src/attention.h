// Attention over the paged cache.
//
// A context is cut at fixed positions into pieces of kPiece keys. Each piece is a softmax of its own over packed keys
// and values; pieces are joined in their order. So a row's result depends on its own context alone: not on where blocks
// lie, which rows are computed beside it, or whether one thread takes all pieces of a row or several share them.

constexpr int64_t kMostPartialBytes = 64 << 20;
constexpr int64_t kTaskRows = 64;  // query rows (tokens times heads of one KV head) that share one packing of keys

// What one piece gives to its rows, and what the pieces so far have given: maximum, sum of weights, weighted values.
struct Partial {
    float *max, *sum, *values;
};

template <class T>
struct Attention {
    const Op& op;
    const Step& step;
    Team& team;
    const Paged<T> paged{op, step, team};
    const Group& group = paged.group;
    const int64_t heads = op.n0, kv_heads = op.cache.kv_heads, shared_by = heads / kv_heads;
    const int64_t dim = paged.dim, depth = paged.depth, width = paged.width;
    const int64_t token_block = most(1, kTaskRows / shared_by);
    const int64_t max_rows = token_block * shared_by;

    // [requests + 1]: tasks [first_task[r], first_task[r + 1]) belong to request r; a task is a block of its tokens and
    // a KV head.
    const int64_t* first_task = nullptr;

    int64_t tasks() const {
        int64_t count = 0;
        for (int64_t r = 0; r < step.requests; ++r) count += blocks(r) * kv_heads;
        return count;
    }

    int64_t blocks(int64_t request) const {
        return (step.query_start[request + 1] - step.query_start[request] + token_block - 1) / token_block;
    }

    int64_t index_bytes() const { return round_up((step.requests + 1) * sizeof(int64_t), 64); }
    void index(int64_t* to) {
        first_task = to;
        to[0] = 0;
        for (int64_t r = 0; r < step.requests; ++r) to[r + 1] = to[r] + blocks(r) * kv_heads;
    }

    int64_t request_of(int64_t task) const {
        int64_t begin = 0, end = step.requests;
        while (end - begin > 1) {
            const int64_t middle = (begin + end) / 2;
            (first_task[middle] <= task ? begin : end) = middle;
        }
        return begin;
    }

    Rows rows_of(int64_t task) const {
        const int64_t request = request_of(task);
        return rows_at(request, task - first_task[request]);
    }

    // Of the given task among those of a request.
    Rows rows_at(int64_t request, int64_t task) const {
        Rows rows{request, task % kv_heads, 0, 0, 0};
        const int64_t end = step.query_start[request + 1];
        rows.begin = step.query_start[request] + task / kv_heads * token_block;
        rows.end = least(end, rows.begin + token_block);
        rows.first_position = step.context_len[request] - (end - rows.begin);
        return rows;
    }

    int64_t count(const Rows& rows) const { return (rows.end - rows.begin) * shared_by; }
    int64_t first_key(const Rows& rows) const {
        return group.window ? most(0, rows.first_position - group.window + 1) : 0;
    }
    int64_t end_key(const Rows& rows) const { return rows.first_position + rows.end - rows.begin; }
    int64_t first_piece(const Rows& rows) const { return first_key(rows) / kPiece; }
    int64_t end_piece(const Rows& rows) const { return (end_key(rows) + kPiece - 1) / kPiece; }

    // Of the rows that have most.
    int64_t most_pieces() const {
        int64_t most_ = 0;
        for (int64_t r = 0; r < step.requests; ++r)
            for (int64_t block = 0; block < blocks(r); ++block) {
                const Rows rows = rows_at(r, block * kv_heads);
                most_ = most(most_, end_piece(rows) - first_piece(rows));
            }
        return most_;
    }

    int64_t partial_bytes() const { return round_up(max_rows * (2 + width) * sizeof(float), 64); }
    Partial partial_at(void* memory) const {
        float* floats = static_cast<float*>(memory);
        return {floats + max_rows * width, floats + max_rows * (width + 1), floats};
    }

    // One thread's memory for a piece.
    struct Space {
        T *queries, *keys, *values, *weights;
        float* scores;
        Partial piece, total;
    };
    Space space(Worker& worker) const {
        const int64_t sizes[] = {max_rows * depth * int64_t(sizeof(T)), kPiece * depth * int64_t(sizeof(T)),
                                 kPiece * width * int64_t(sizeof(T)),   max_rows * kPiece * int64_t(sizeof(T)),
                                 max_rows * kPiece * int64_t(sizeof(float)), partial_bytes(), partial_bytes()};
        int64_t bytes = 0;
        for (int64_t size : sizes) bytes += round_up(size, 64);
        char* at = static_cast<char*>(worker.scratch.take(bytes));
        void* parts[7];
        for (int i = 0; i < 7; ++i) parts[i] = at, at += round_up(sizes[i], 64);
        return {static_cast<T*>(parts[0]), static_cast<T*>(parts[1]), static_cast<T*>(parts[2]),
                static_cast<T*>(parts[3]), static_cast<float*>(parts[4]), partial_at(parts[5]), partial_at(parts[6])};
    }

    void copy_queries(const Rows& rows, T* to) const {
        for (int64_t token = rows.begin; token < rows.end; ++token)
            for (int64_t head = 0; head < shared_by; ++head, to += depth) {
                const T* from = static_cast<const T*>(op.a) + (token * heads + rows.kv_head * shared_by + head) * dim;
                memcpy(to, from, dim * sizeof(T));
                memset(to + dim, 0, (depth - dim) * sizeof(T));
            }
    }

    // Softmax weights of one row over columns [from, to) of a piece, whose groups [first, end) have scores.
    void weigh(const Space& space, int64_t row, int64_t from, int64_t to, int64_t first, int64_t end) const {
        float* scores = space.scores + row * kPiece;
        T* weights = space.weights + row * kPiece;
        const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const f32x16 nothing = splat(-__builtin_inff());
        f32x16 largest = nothing;
        for (int64_t i = first; i < end; i += kLanes) {
            f32x16 score = load(scores + i) * op.f0;
            if (op.f1 != 0.0f) score = op.f1 - op.f1 * 2.0f / (1.0f + exp(score * (2.0f / op.f1)));
            const i32x16 column = lane + static_cast<int32_t>(i);
            score = (column >= static_cast<int32_t>(from)) & (column < static_cast<int32_t>(to)) ? score : nothing;
            store(scores + i, score);
            largest = max(largest, score);
        }
        const float top = max_lane(largest);
        f32x16 sum = {};
        for (int64_t i = first; i < end; i += kLanes) {
            const f32x16 weight = exp(load(scores + i) - top);
            sum += weight;
            store(weights + i, weight);
        }
        space.piece.max[row] = top;
        space.piece.sum[row] = sum_lanes(sum);
    }

    // Leaves in space.piece what a piece gives to the rows whose queries are in space.queries.
    void attend(const Rows& rows, int64_t piece, const Space& space, Worker& worker) const {
        const int64_t base = piece * kPiece, row_count = count(rows);
        const int64_t first = most(first_key(rows), base), end = least(end_key(rows), base + kPiece);
        // Whole depths of keys, so that sums begin and end at the same places for every row.
        const int64_t from = (first - base) / kDepth * kDepth;
        const int64_t to = least(kPiece, (end - base + kDepth - 1) / kDepth * kDepth);
        for (int64_t i = from; i < to; i += kDepth) {
            paged.pack_keys(rows, base + i, first, end, space.keys + i * depth);
            paged.pack_values(rows, base + i, first, end, space.values + i * kLanes);
        }
        for (int64_t row = 0; row < row_count; row += kRowBlock) {
            const int64_t height = least(kRowBlock, row_count - row);
            for (int64_t i = from; i < to; i += kOutBlock)
                multiply(worker, space.queries + row * depth, depth, space.keys + i * depth, depth * kLanes, depth,
                         height, 2, space.scores + row * kPiece + i, kPiece);
        }
        for (int64_t row = 0; row < row_count; ++row) {
            const int64_t position = rows.first_position + row / shared_by;
            const int64_t seen_from = group.window ? most(0, position - group.window + 1 - base) : 0;
            const int64_t seen_to = most(0, position + 1 - base);
            if (seen_from >= least(seen_to, kPiece)) {
                space.piece.sum[row] = 0.0f;
                memset(space.weights + row * kPiece + from, 0, (to - from) * sizeof(T));
            } else {
                weigh(space, row, seen_from, seen_to, from, to);
            }
        }
        for (int64_t row = 0; row < row_count; row += kRowBlock) {
            const int64_t height = least(kRowBlock, row_count - row);
            for (int64_t d = 0; d < width; d += kOutBlock)
                multiply(worker, space.weights + row * kPiece + from, kPiece,
                         space.values + d * kPiece + from * kLanes, kPiece * kLanes, to - from, height,
                         width - d > kLanes ? 2 : 1, space.piece.values + row * width + d, width);
        }
    }

    void begin(const Rows& rows, const Partial& total) const {
        for (int64_t row = 0; row < count(rows); ++row) {
            total.max[row] = -__builtin_inff();
            total.sum[row] = 0.0f;
        }
        memset(total.values, 0, count(rows) * width * sizeof(float));
    }

    void join(const Rows& rows, const Partial& piece, const Partial& total) const {
        for (int64_t row = 0; row < count(rows); ++row) {
            if (piece.sum[row] == 0.0f) continue;  // it sees nothing of this piece
            const float top = total.max[row] > piece.max[row] ? total.max[row] : piece.max[row];
            const f32x16 changed = exp(f32x16{total.max[row] - top, piece.max[row] - top});
            const float old_factor = changed[0], factor = changed[1];
            total.max[row] = top;
            total.sum[row] = total.sum[row] * old_factor + piece.sum[row] * factor;
            for (int64_t d = row * width; d < (row + 1) * width; d += kLanes)
                store(total.values + d,
                      fma(load(total.values + d), splat(old_factor), load(piece.values + d) * factor));
        }
    }

    void finish(const Rows& rows, const Partial& total) const {
        for (int64_t row = 0; row < count(rows); ++row) {
            const int64_t token = rows.begin + row / shared_by, head = rows.kv_head * shared_by + row % shared_by;
            T* out = static_cast<T*>(op.out) + (token * heads + head) * dim;
            const float factor = 1.0f / total.sum[row];
            for (int64_t d = 0; d < dim; d += kLanes)
                store_some(out + d, load(total.values + row * width + d) * factor, dim - d);
        }
    }
};

template <class T>
static void attend_whole(const Attention<T>& attention, int64_t tasks) {
    attention.team.for_each(tasks, [&](int64_t task, Worker& worker) {
        const Rows rows = attention.rows_of(task);
        const auto space = attention.space(worker);
        attention.copy_queries(rows, space.queries);
        attention.begin(rows, space.total);
        for (int64_t piece = attention.first_piece(rows); piece < attention.end_piece(rows); ++piece) {
            attention.attend(rows, piece, space, worker);
            attention.join(rows, space.piece, space.total);
        }
        attention.finish(rows, space.total);
    });
}

// The same, with the pieces of a row shared by threads.
template <class T>
static void attend_pieces(const Attention<T>& attention, int64_t tasks, int64_t pieces, char* partials) {
    Team& team = attention.team;
    const int64_t bytes = attention.partial_bytes();
    team.for_each(tasks * pieces, [&](int64_t index, Worker& worker) {
        const Rows rows = attention.rows_of(index / pieces);
        const int64_t piece = attention.first_piece(rows) + index % pieces;
        if (piece >= attention.end_piece(rows)) return;
        auto space = attention.space(worker);
        space.piece = attention.partial_at(partials + index * bytes);
        attention.copy_queries(rows, space.queries);
        attention.attend(rows, piece, space, worker);
    });
    team.for_each(tasks, [&](int64_t task, Worker& worker) {
        const Rows rows = attention.rows_of(task);
        const Partial total = attention.space(worker).total;
        attention.begin(rows, total);
        const int64_t count = attention.end_piece(rows) - attention.first_piece(rows);
        for (int64_t i = 0; i < count; ++i)
            attention.join(rows, attention.partial_at(partials + (task * pieces + i) * bytes), total);
        attention.finish(rows, total);
    });
}

template <class T>
static void attention(const Op& op, const Step& step, Team& team) {
    Attention<T> attention{op, step, team};
    const int64_t tasks = attention.tasks(), index_bytes = attention.index_bytes();
    const int64_t pieces = tasks < 4 * team.threads() && team.threads() > 1 ? attention.most_pieces() : 1;
    const int64_t partial_bytes = tasks * pieces * attention.partial_bytes();
    const bool shares_pieces = pieces > 1 && partial_bytes <= kMostPartialBytes;
    char* shared = static_cast<char*>(team.shared(index_bytes + (shares_pieces ? partial_bytes : 0)));
    attention.index(reinterpret_cast<int64_t*>(shared));
    if (shares_pieces)
        attend_pieces(attention, tasks, pieces, shared + index_bytes);
    else
        attend_whole(attention, tasks);
}

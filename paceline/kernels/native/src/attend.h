// Attention of a step: the distribution of rows, or of pieces of their contexts, to threads. See attention.h.

template <class T, int64_t Format>
static void attend_whole(const Attention<T, Format>& attention, int64_t tasks) {
    using Prefetch = typename Attention<T, Format>::Prefetch;
    struct Task {
        Rows rows;
        Prefetch next;  // prefetch for what is probably this thread's next task
    };
    const auto find = [&](int64_t task) {
        const Rows rows = attention.tasks.rows_of(task);
        if (task + 1 >= tasks) return Task{rows, {rows, 0, 0}};
        const Rows next = attention.tasks.rows_of(task + 1);
        return Task{rows, attention.prefetch_of(next, attention.first_piece(next))};
    };
    attention.team.for_each_restartable(tasks, find, [=](const Task& task, Worker& worker) {
        const Rows& rows = task.rows;
        const auto space = attention.space(worker);
        attention.take_queries(rows, space);
        attention.begin(rows, space.total);
        for (int64_t piece = attention.first_piece(rows); piece < attention.end_piece(rows); ++piece) {
            const bool goes_on = piece + 1 < attention.end_piece(rows);
            Prefetch prefetch = goes_on ? attention.prefetch_of(rows, piece + 1) : task.next;
            // Each block of rows is joined at once, while its results are in the L1 cache.
            attention.attend(rows, piece, prefetch, space, worker, [&](int64_t) { return space.piece; },
                             [&](int64_t row, int64_t height) {
                                 attention.join(height, space.piece, space.total.from(row, attention.width));
                             });
        }
        if (!worker.may_write()) return;
        attention.finish(rows, space.total);
    });
}

// The same, but threads share the pieces of a row.
template <class T, int64_t Format>
static void attend_pieces(const Attention<T, Format>& attention, int64_t tasks, int64_t pieces, char* partials) {
    Team& team = attention.team;
    const int64_t bytes = attention.partial_bytes();
    using Prefetch = typename Attention<T, Format>::Prefetch;
    struct Piece {
        Rows rows;
        int64_t number;
        char* partial;
        Prefetch next;  // prefetch for what is probably this thread's next piece
    };
    const auto find = [&](int64_t index) {
        const Rows rows = attention.tasks.rows_of(index / pieces);
        const int64_t number = attention.first_piece(rows) + index % pieces;
        Prefetch next = attention.prefetch_of(rows, number + 1);
        if (next.position >= next.end && index / pieces + 1 < tasks) {
            const Rows other = attention.tasks.rows_of(index / pieces + 1);
            next = attention.prefetch_of(other, attention.first_piece(other));
        }
        return Piece{rows, number, partials + index * bytes, next};
    };
    team.for_each_restartable(tasks * pieces, find, [=](const Piece& piece, Worker& worker) {
        if (piece.number >= attention.end_piece(piece.rows)) return;
        const auto space = attention.space(worker);
        attention.take_queries(piece.rows, space);
        Prefetch prefetch = piece.next;
        attention.attend(piece.rows, piece.number, prefetch, space, worker,
                         [&](int64_t row) { return space.piece.from(row, attention.width); }, [](int64_t, int64_t) {});
        if (worker.may_write()) memcpy(piece.partial, space.piece.values, bytes);
    });
    team.for_each(tasks, [&](int64_t task, Worker& worker) {
        const Rows rows = attention.tasks.rows_of(task);
        const Partial total = attention.space(worker).total;
        attention.begin(rows, total);
        const int64_t count = attention.end_piece(rows) - attention.first_piece(rows);
        for (int64_t i = 0; i < count; ++i)
            attention.join(attention.count(rows), attention.partial_at(partials + (task * pieces + i) * bytes), total);
        attention.finish(rows, total);
    });
}

template <class T, int64_t Format>
static void attend_format(const Op& op, const Step& step, Team& team) {
    Attention<T, Format> attention{op, step, team};
    const int64_t count = attention.tasks.count(), index_bytes = attention.tasks.index_bytes();
    const int64_t pieces = count < 4 * team.threads() && team.threads() > 1 ? attention.most_pieces() : 1;
    const int64_t partial_bytes = count * pieces * attention.partial_bytes();
    const bool shares_pieces = pieces > 1 && partial_bytes <= kMostPartialBytes;
    char* shared = static_cast<char*>(team.shared(index_bytes + (shares_pieces ? partial_bytes : 0)));
    attention.tasks.index(reinterpret_cast<int64_t*>(shared));
    if (shares_pieces)
        attend_pieces(attention, count, pieces, shared + index_bytes);
    else
        attend_whole(attention, count);
}

template <class T>
static void attention(const Op& op, const Step& step, Team& team) {
    if (op.format == kCacheInt8) attend_format<T, kCacheInt8>(op, step, team);
    else if (op.format == kCacheFp8) attend_format<T, kCacheFp8>(op, step, team);
    else attend_format<T, kCacheWhole>(op, step, team);
}

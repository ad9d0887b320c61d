// The distribution of a step's queries to threads.

constexpr int64_t kTaskRows = 256;  // query rows (tokens times heads of one KV head) that share one packing of keys

// Rows that share keys: tokens [begin, end) of one request, all heads of one KV head.
struct Rows {
    int64_t request, kv_head, begin, end;
    int64_t first_position;  // of token `begin`
};

// A task is a block of one request's tokens and a KV head.
struct Tasks {
    const Step& step;
    const int64_t kv_heads, shared_by;
    const int64_t token_block = most(1, least(most_tokens(), kTaskRows / shared_by));
    // [requests + 1]: tasks [first_task[r], first_task[r + 1]) belong to request r.
    const int64_t* first_task = nullptr;

    // Tokens of the request that has most.
    int64_t most_tokens() const {
        int64_t tokens = 0;
        for (int64_t r = 0; r < step.requests; ++r)
            tokens = most(tokens, step.query_start[r + 1] - step.query_start[r]);
        return tokens;
    }

    int64_t count() const {
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

    // Returns the rows of a task, numbered within its request.
    Rows rows_at(int64_t request, int64_t task) const {
        Rows rows{request, task % kv_heads, 0, 0, 0};
        const int64_t end = step.query_start[request + 1];
        rows.begin = step.query_start[request] + task / kv_heads * token_block;
        rows.end = least(end, rows.begin + token_block);
        rows.first_position = step.context_len[request] - (end - rows.begin);
        return rows;
    }
};

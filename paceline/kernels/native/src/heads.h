// Operations on vectors of heads.

// out[tokens, heads, n1] = products of each head's vector with the head's own matrix.
template <class T>
static void linear_heads(const Op& op, const Step& step, Team& team) {
    const int64_t heads = op.cache.kv_heads, outputs = op.n1, depth = padded<T>(op.n0);
    if (op.rows * step.tokens == 0) return;
    Op pairs = op;  // x as rows (token, head)
    pairs.rows = op.rows * heads;
    const auto all = input_of<T>(pairs, step, team, depth, Columns{});
    Input<T> first = all;  // the rows of head 0
    static_cast<Chunks&>(first) = Chunks(op.rows * step.tokens, depth * sizeof(*all.x));
    first.stride = all.stride * heads;
    const int64_t size = packed_elements(op.type, outputs, op.n0);
    const int64_t blocks = (outputs + kTaskOut - 1) / kTaskOut;
    const T* weights = static_cast<const T*>(op.b);
    T* outs = static_cast<T*>(op.out);
    team.for_each_restartable(first.chunks * heads * blocks, itself, [=](int64_t task, Worker& worker) {
        const int64_t begin = task % blocks * kTaskOut, head = task / blocks % heads;
        const int64_t count = least(kTaskOut, outputs - begin);
        const Packed<T> matrix{weights + head * size, outputs};
        Input<T> input = first;
        input.x += head * all.stride;
        Slice<Packed<T>> slices[kTaskOut / kOutBlock];
        int64_t slice = 0;
        for (int64_t i = 0; i < count; i += kOutBlock) slices[slice++] = {&matrix, begin + i};
        Packed<T>::multiply_slices(input, worker, task / blocks / heads, slices, slice,
                                   [&](int64_t token, const float* sums) {
                                       T* out = outs + (token * heads + head) * outputs + begin;
                                       finish<T>(sums, nullptr, out, count);
                                   });
    });
}

template <class T>
static void concat(const Op& op, const Step& step, Team& team) {
    const int64_t left = op.n0, right = op.n1;
    for_each_row(team, op.rows * step.tokens, left + right, [&](int64_t row) {
        T* out = static_cast<T*>(op.out) + row * (left + right);
        memcpy(out, static_cast<const T*>(op.a) + row * left, left * sizeof(T));
        memcpy(out + left, static_cast<const T*>(op.b) + row * right, right * sizeof(T));
    });
}

// Operations on single rows.

constexpr int64_t kTaskElements = 8192;  // elements in one task

// Calls body(row) for every row of `size` elements.
template <class Body>
static void for_each_row(Team& team, int64_t rows, int64_t size, const Body& body) {
    const int64_t step = most(1, kTaskElements / most(1, size));
    team.for_each((rows + step - 1) / step, [&](int64_t task, Worker&) {
        for (int64_t row = task * step; row < least(rows, (task + 1) * step); ++row) body(row);
    });
}

template <class T>
static void rms_norm(const Op& op, const Step& step, Team& team) {
    const int64_t size = op.n0;
    const T* weight = static_cast<const T*>(op.b);
    const bool rounds = op.n2 == kNormRounded;
    const float offset = op.n2 == kNormUnitOffset ? 1.0f : 0.0f;
    for_each_row(team, op.rows * step.tokens, size, [&](int64_t row) {
        const T* x = static_cast<const T*>(op.a) + row * op.n1;
        T* out = static_cast<T*>(op.out) + row * size;
        f32x16 squares = {};
        for (int64_t i = 0; i < size; i += kLanes) {
            const f32x16 value = load_some(x + i, size - i);
            squares = fma(value, value, squares);
        }
        const float factor = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(size) + op.f0);
        for (int64_t i = 0; i < size; i += kLanes) {
            const f32x16 normed = load_some(x + i, size - i) * factor, w = load_some(weight + i, size - i);
            store_some(out + i, rounds ? round_to(x, normed) * w : normed * (offset + w), size - i);
        }
    });
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias, of x or of x + y, which is rounded as by itself.
template <class T>
static void layer_norm(const Op& op, const Step& step, Team& team) {
    const int64_t size = op.n0;
    const T *weight = static_cast<const T*>(op.b), *bias = static_cast<const T*>(op.c);
    for_each_row(team, op.rows * step.tokens, size, [&](int64_t row) {
        const T* x = static_cast<const T*>(op.a) + row * op.n1;
        T* out = static_cast<T*>(op.out) + row * size;
        if (op.d) {
            const T* y = static_cast<const T*>(op.d) + row * size;
            for (int64_t i = 0; i < size; i += kLanes)
                store_some(out + i, load_some(x + i, size - i) + load_some(y + i, size - i), size - i);
            x = out;
        }
        f32x16 sums = {}, squares = {};
        for (int64_t i = 0; i < size; i += kLanes) sums += load_some(x + i, size - i);
        const float mean = sum_lanes(sums) / static_cast<float>(size);
        for (int64_t i = 0; i < size; i += kLanes) {
            f32x16 distance = load_some(x + i, size - i) - mean;
            if (size - i < kLanes) {
                const auto is_in_row = bits<u32x16>(lane_numbers<i32x16>()) < static_cast<uint32_t>(size - i);
                distance = select(is_in_row, distance, f32x16{});
            }
            squares = fma(distance, distance, squares);
        }
        const float factor = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(size) + op.f0);
        for (int64_t i = 0; i < size; i += kLanes) {
            const int64_t count = size - i;
            f32x16 normed = (load_some(x + i, count) - mean) * factor * load_some(weight + i, count);
            if (bias) normed += load_some(bias + i, count);
            store_some(out + i, normed, count);
        }
    });
}

template <class T>
static void rotation(const Op& op, const Step& step, Team& team) {
    const int64_t* positions = op.a ? static_cast<const int64_t*>(op.a) : step.positions;
    const float* frequencies = static_cast<const float*>(op.b);
    const int64_t half = op.n0, tokens = op.rows * step.tokens;
    float* cosines = static_cast<float*>(op.out);
    float* sines = static_cast<float*>(const_cast<void*>(op.c));
    for_each_row(team, tokens, 32 * half, [&](int64_t token) {
        const float steps = static_cast<float>(1 + positions[token] / op.n1);
        const float factor = op.f0 * (1.0f + op.f1 * __builtin_logf(steps));
        for (int64_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(positions[token]) * frequencies[i];
            float* cosine = cosines + token * 2 * half + i;
            float* sine = sines + token * 2 * half + i;
            cosine[0] = cosine[half] = frequencies[i] == 0.0f ? 1.0f : __builtin_cosf(angle) * factor;
            sine[0] = sine[half] = __builtin_sinf(angle) * factor;
        }
    });
}

template <class T>
static void rotate(const Op& op, const Step& step, Team& team) {
    const int64_t heads = op.n0, size = op.n1, half = size / 2;
    for_each_row(team, op.rows * step.tokens, heads * size, [&](int64_t token) {
        const float* cosine = static_cast<const float*>(op.b) + token * size;
        const float* sine = static_cast<const float*>(op.c) + token * size;
        for (int64_t head = 0; head < heads; ++head) {
            const T* x = static_cast<const T*>(op.a) + token * op.n2 + head * size;
            T* out = static_cast<T*>(op.out) + (token * heads + head) * size;
            for (int64_t i = 0; i < half; i += kLanes) {
                const int64_t count = half - i;
                const f32x16 first = load_some(x + i, count), second = load_some(x + half + i, count);
                const f32x16 c1 = load_some(cosine + i, count), c2 = load_some(cosine + half + i, count);
                const f32x16 s1 = load_some(sine + i, count), s2 = load_some(sine + half + i, count);
                store_some(out + i, first * c1 - second * s1, count);
                store_some(out + half + i, second * c2 + first * s2, count);
            }
        }
    });
}

// out[i] = f(a[i], b[i]) for all elements of rows of op.n0. Rows of b are op.n1 elements apart.
template <class T, class F>
static void elementwise(const Op& op, const Step& step, Team& team, const F& f) {
    const T* a = static_cast<const T*>(op.a);
    const T* b = static_cast<const T*>(op.b);
    T* out = static_cast<T*>(op.out);
    const int64_t rows = op.rows * step.tokens, count = rows * op.n0;
    if (op.n1 != op.n0)
        return for_each_row(team, rows, op.n0, [&](int64_t row) {
            const T *own_a = a + row * op.n0, *own_b = b + row * op.n1;
            for (int64_t i = 0; i < op.n0; i += kLanes)
                store_some(out + row * op.n0 + i, f(load_some(own_a + i, op.n0 - i), load_some(own_b + i, op.n0 - i)),
                           op.n0 - i);
        });
    team.for_each((count + kTaskElements - 1) / kTaskElements, [&](int64_t task, Worker&) {
        const int64_t end = least(count, (task + 1) * kTaskElements);
        int64_t i = task * kTaskElements;
        for (; i + kLanes <= end; i += kLanes) store(out + i, f(load(a + i), load(b + i)));
        for (; i < end; i += kLanes)
            store_some(out + i, f(load_some(a + i, end - i), load_some(b + i, end - i)), end - i);
    });
}

template <class T>
struct SiluAndMul {
    PACELINE_INLINED f32x16 operator()(const f32x16& gate, const f32x16& up) const {
        return round_to(static_cast<const T*>(nullptr), gate * reciprocal(1.0f + exp(-gate))) * up;
    }
};

template <class T>
struct GeluTanhAndMul {
    PACELINE_INLINED f32x16 operator()(const f32x16& gate, const f32x16& up) const {
        // 0.5 * (1 + tanh(u)) is the logistic function of 2u; 2 * sqrt(2 / pi) = 1.5957691.
        const f32x16 u2 = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
        return round_to(static_cast<const T*>(nullptr), gate * reciprocal(1.0f + exp(-u2))) * up;
    }
};

// x times the normal distribution's share below x. That share is exp(-x^2 / 2) R(1 / (1 + 0.3 |x|)) for x < 0; R is the
// polynomial with the least relative error, 1.5e-7.
PACELINE_INLINE f32x16 exact_gelu(const f32x16& x) {
    const f32x16 magnitude = max(x, -x), t = reciprocal(1.0f + 0.3f * magnitude);
    f32x16 p = splat(0.035677582025527954f);
    p = fma(p, t, splat(-0.15721462666988373f));
    p = fma(p, t, splat(0.20637303590774536f));
    p = fma(p, t, splat(-0.05370118468999863f));
    p = fma(p, t, splat(0.12857061624526978f));
    p = fma(p, t, splat(0.09991087019443512f));
    p = fma(p, t, splat(0.12075436115264893f));
    p = fma(p, t, splat(0.11962927132844925f));
    const f32x16 tail = exp(-0.5f * x * x) * p * t;
    return x * select(x < 0.0f, tail, 1.0f - tail);
}

template <class T>
static void gelu(const Op& op, const Step& step, Team& team) {
    Op same = op;
    same.b = op.a;
    same.n1 = op.n0;
    if (op.n2) {
        constexpr GeluTanhAndMul<float> tanh_form{};
        elementwise<T>(same, step, team, [=](const f32x16& x, const f32x16&) PACELINE_INLINED {
            return tanh_form(x, splat(1.0f));
        });
    } else {
        elementwise<T>(same, step, team, [](const f32x16& x, const f32x16&) PACELINE_INLINED { return exact_gelu(x); });
    }
}

template <class T>
static void gelu_and_mul(const Op& op, const Step& step, Team& team) {
    elementwise<T>(op, step, team, [](const f32x16& gate, const f32x16& up) PACELINE_INLINED {
        return round_to(static_cast<const T*>(nullptr), exact_gelu(gate)) * up;
    });
}

template <class T>
static void silu_and_mul(const Op& op, const Step& step, Team& team) {
    elementwise<T>(op, step, team, SiluAndMul<T>{});
}

template <class T>
static void gelu_tanh_and_mul(const Op& op, const Step& step, Team& team) {
    elementwise<T>(op, step, team, GeluTanhAndMul<T>{});
}

template <class T>
static void sigmoid_and_mul(const Op& op, const Step& step, Team& team) {
    elementwise<T>(op, step, team, [](const f32x16& gate, const f32x16& up) PACELINE_INLINED {
        return round_to(static_cast<const T*>(nullptr), reciprocal(1.0f + exp(-gate))) * up;
    });
}

template <class T>
static void add(const Op& op, const Step& step, Team& team) {
    elementwise<T>(op, step, team, [](f32x16 a, f32x16 b) { return a + b; });
}

template <class T>
static void scale(const Op& op, const Step& step, Team& team) {
    Op same = op;
    same.b = op.a;
    same.n1 = op.n0;
    elementwise<T>(same, step, team, [factor = op.f0](f32x16 a, f32x16) { return a * factor; });
}

// out[row] = a[row] + sigmoid(c[row]) * b[row]
template <class T>
static void add_gated(const Op& op, const Step& step, Team& team) {
    const int64_t size = op.n0;
    for_each_row(team, op.rows * step.tokens, size, [&](int64_t row) {
        const T* x = static_cast<const T*>(op.a) + row * size;
        const T* y = static_cast<const T*>(op.b) + row * size;
        T* out = static_cast<T*>(op.out) + row * size;
        const f32x16 gate = splat(load_some(static_cast<const T*>(op.c) + row, 1)[0]);
        const f32x16 factor = round_to(x, 1.0f / (1.0f + exp(-gate)));
        for (int64_t i = 0; i < size; i += kLanes) {
            const f32x16 added = round_to(x, factor * load_some(y + i, size - i));
            store_some(out + i, load_some(x + i, size - i) + added, size - i);
        }
    });
}

// Weighted sums of values that stay in their blocks, for products in fp32.

template <class T>
struct Weighing {
    const float* weights;  // [rows][keys], rows kPiece apart
    const T* const* values;  // the row of `dim` values of each key
    int64_t keys, dim;
    float* out;  // [rows][width]
    int64_t width;

    // Computes `Rows` rows from `row` on. Each sum is the same, in the same order, as that of `multiply` with packed
    // values. Calls begin_columns(groups) before each pass over the keys, for `groups` times kLanes columns.
    template <int Rows, class Begin>
    void run(int64_t row, const Begin& begin_columns) const {
        const auto columns = [&](auto groups, auto whole, int64_t d) {
            begin_columns(groups);
            add_columns<Rows, groups, whole>(row, d);
        };
        // Two groups of columns at once, if their sums fit in registers.
        constexpr int parts = 2 * kParts, groups = Rows * parts + (Rows < parts ? Rows : parts) < kRegisters ? 2 : 1;
        int64_t d = 0;
        for (; d + groups * kLanes <= dim; d += groups * kLanes)
            columns(std::integral_constant<int, groups>{}, std::true_type{}, d);
        for (; d + kLanes <= dim; d += kLanes) columns(std::integral_constant<int, 1>{}, std::true_type{}, d);
        if (d < dim) columns(std::integral_constant<int, 1>{}, std::false_type{}, d);
    }

  private:
    // Computes columns [d, d + kLanes * Groups). Whole: all of them exist.
    template <int Rows, int Groups, bool Whole>
    __attribute__((noinline)) void add_columns(int64_t row, int64_t d) const {
        constexpr int parts = Groups * kParts;
        const Weighing own = *this;  // so that the compiler knows that sums do not overwrite it
        const float* own_weights = own.weights + row * kPiece;
        Floats sums[Rows * parts];
        unrolled<Rows * parts>([&](int i) PACELINE_INLINED { sums[i] = Floats{}; });
        for (int64_t key = 0; key < own.keys; ++key) {
            const auto value = [&](int part) PACELINE_INLINED {
                const int64_t column = d + part * kRegisterLanes;
                const T* from = own.values[key] + column;
                return Whole ? widened(from) : widened_some(from, own.dim - column);
            };
            const auto weight = [&](int r) PACELINE_INLINED { return splat<Floats>(own_weights[r * kPiece + key]); };
            // Keeps weights or values in registers, whichever are fewer.
            const auto add = [&](int r, int part, const Floats& w, const Floats& v) PACELINE_INLINED {
                sums[r * parts + part] = fma(w, v, sums[r * parts + part]);
            };
            if constexpr (Rows < parts) {
                Floats all[Rows];
                unrolled<Rows>([&](int r) PACELINE_INLINED { all[r] = weight(r); });
                unrolled<parts>([&](int part) PACELINE_INLINED {
                    const Floats v = value(part);
                    unrolled<Rows>([&](int r) PACELINE_INLINED { add(r, part, all[r], v); });
                });
            } else {
                Floats all[parts];
                unrolled<parts>([&](int part) PACELINE_INLINED { all[part] = value(part); });
                unrolled<Rows>([&](int r) PACELINE_INLINED {
                    const Floats w = weight(r);
                    unrolled<parts>([&](int part) PACELINE_INLINED { add(r, part, w, all[part]); });
                });
            }
        }
        unrolled<Rows * parts>([&](int i) PACELINE_INLINED {
            write(own.out + (row + i / parts) * own.width + d + i % parts * kRegisterLanes, sums[i]);
        });
    }

    static Floats widened(const float* from) { return read<Floats>(from); }
    static Floats widened(const bf16* from) {
        return bits<Floats>(convert<Words>(read<Vector<uint16_t, kRegisterLanes>>(from)) << 16);
    }
    static Floats widened_some(const T* from, int64_t count) {
        T lanes[kRegisterLanes] = {};
        memcpy(lanes, from, most(0, least(kRegisterLanes, count)) * sizeof(T));
        return widened(lanes);
    }
};

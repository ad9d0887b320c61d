// Linear layers and the embedding over weights that stay in blocks of 4 or 8 bits. Tiles are unpacked (unpack.h) to the
// layout of packed weights of the type of x just before the product of such weights. So results equal those of packed
// weights bit for bit, in every instruction set, for one row and for many.

constexpr int64_t kStrip = 4 * kDepth;  // values along `in` whose unpacked tiles stay in a core's L1 cache

#ifdef PACELINE_AMX
// Computes the sums of up to two groups of sixteen outputs, [group][16][columns], `stride` floats apart. The unpacked
// weights are on the left of the product, x [in / 2][columns][2] on the right. Each sum keeps its order.
static inline void multiply_nibble_rows(Worker& worker, const uint8_t* tiles, const TileLayout& layout, int64_t groups,
                                        const bf16* x, int64_t columns, int64_t in, float* sums, int64_t stride) {
    configure_columns(worker, static_cast<int>(columns));
    alignas(64) bf16 unpacked[2 * kStrip * kLanes];
    const int64_t bytes = layout.tile_bytes();
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < in; k += kStrip) {
        const int64_t count = least(kStrip, in - k) / kDepth;
        for (int64_t i = 0; i < count * groups; ++i) {
            const TileLayout::Block block = layout.block(tiles + i % groups * bytes, groups, k / kDepth + i / groups);
            prefetch_tile(block.codes, bytes >> layout.span);
            unpack_rows(block, layout, unpacked + i * kLanes * kDepth);
        }
        finish_writes();
        const bf16* weights = unpacked;
        for (int64_t i = 0; i < count; ++i) {
            _tile_loadd(4, x + (k + i * kDepth) * columns, 4 * columns);
            _tile_loadd(6, weights, 64);
            _tile_dpbf16ps(0, 6, 4);
            weights += kLanes * kDepth;
            if (groups == 1) continue;
            _tile_loadd(7, weights, 64);
            _tile_dpbf16ps(1, 7, 4);
            weights += kLanes * kDepth;
        }
    }
    _tile_stored(0, sums, 4 * stride);
    if (groups == 2) _tile_stored(1, sums + kLanes * stride, 4 * stride);
}

// Computes the sums of one panel for up to sixteen rows of x, [rows][kTaskOut].
static inline void multiply_by_rows(Worker& worker, const uint8_t* tiles, const TileLayout& layout, int64_t groups,
                                    const bf16* x, int64_t rows, int64_t in, float* sums) {
    if (rows == 1) return multiply_nibble_rows(worker, tiles, layout, groups, x, 1, in, sums, 1);
    alignas(64) float columns[kOutBlock * kLanes];
    multiply_nibble_rows(worker, tiles, layout, groups, x, rows, in, columns, kLanes);
    for (int64_t group = 0; group < groups; ++group) {
        u32x16 square[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) square[i] = read<u32x16>(columns + (group * kLanes + i) * kLanes);
        transpose(square);
        for (int64_t row = 0; row < rows; ++row) write(sums + row * kTaskOut + group * kLanes, square[row]);
    }
}
#endif
// Other types and instruction sets have no nibbles of kFormatRows.
template <class T>
static inline void multiply_by_rows(
    Worker&, const uint8_t*, const TileLayout&, int64_t, const T*, int64_t, int64_t, float*) {}

// A matrix [outputs, in] whose weights stay in blocks.
template <class T>
struct Quantized {
    using Weight = Left<T>;                         // type of unpacked weights
    static constexpr int64_t kMostOut = kOutBlock;  // outputs of one task

    const uint8_t* tiles;
    TileLayout layout;
    int64_t outputs;

    static Quantized of(const void* data, const Op& op) {
        const TileLayout layout(data, op.format, sizeof(Weight) > sizeof(T));
        return {static_cast<const uint8_t*>(data) + layout.head_bytes(), layout, op.n1};
    }
    static int64_t depth(int64_t in) { return round_up(in, kDepth); }
    static Columns columns(const Op& op) {
        return op.format & kFormatRows ? Columns{kLanes, kLanes} : Columns{};
    }
    static Input<T> input(const Op& op, const Step& step, Team& team, const Columns& columns) {
        return input_of<T>(op, step, team, depth(op.n0), columns);
    }

    int64_t groups(int64_t first) const { return outputs - first > kLanes ? 2 : 1; }

    // Unpacks values [k, k + depth) along `in` of kOutBlock outputs; `to`: [groups][stride][16].
    void unpack_outputs(int64_t in, int64_t first, int64_t k, int64_t depth, int64_t stride, Weight* to) const {
        const int64_t bytes = layout.tile_bytes(), count = groups(first), block = k / kDepth;
        const uint8_t* from = tiles + first / kLanes * layout.tiles(in) * bytes;
        for (int64_t group = 0; group < count; ++group)
            unpack(from + group * bytes, layout, count, block, block + depth / kDepth, to + group * stride * kLanes);
    }

    const Weight* sixteen(int64_t first, int64_t in, Worker& worker) const {
        Weight* packed = static_cast<Weight*>(worker.scratch.take(kLanes * in * sizeof(Weight)));
        const int64_t block = first / kOutBlock * kOutBlock, bytes = layout.tile_bytes();
        const uint8_t* from = tiles + (block / kLanes * layout.tiles(in) + (first - block) / kLanes) * bytes;
        unpack(from, layout, groups(block), 0, in / kDepth, packed);
        return packed;
    }

    // Calls finish(row, sums) for the rows of a chunk and up to kTaskOut outputs, in order. For few rows, each strip is
    // unpacked and multiplied. For many rows, all weights are unpacked once.
    template <class Finish>
    static void multiply_slices(const Input<T>& input, Worker& worker, int64_t chunk, const Slice<Quantized>* slices,
                                int64_t count, const Finish& finish) {
        const int64_t in = input.in, rows = input.rows;
        if (rows > kRowBlock) {
            Weight* unpacked = static_cast<Weight*>(worker.scratch.take(count * kOutBlock * in * sizeof(Weight)));
            Panel<Weight> panels[kTaskOut / kOutBlock] = {};
            for (int64_t i = 0; i < count; ++i, unpacked += kOutBlock * in) {
                slices[i].matrix->unpack_outputs(in, slices[i].first, 0, in, in, unpacked);
                panels[i] = {unpacked, nullptr, slices[i].matrix->groups(slices[i].first), false};
            }
            return input.multiply_chunk(worker, chunk, panels, count, finish);
        }
        alignas(64) Weight unpacked[kOutBlock * kStrip];
        alignas(64) float sums[kRowBlock * kTaskOut];
        for (int64_t i = 0; i < count; ++i) {
            const Quantized& own = *slices[i].matrix;
            const int64_t first = slices[i].first, groups = own.groups(first);
            if (own.layout.rows && input.columns) {
                const uint8_t* from = own.tiles + first / kLanes * own.layout.tiles(in) * own.layout.tile_bytes();
                multiply_by_rows(worker, from, own.layout, groups, input.columns, rows, in, sums + i * kOutBlock);
                continue;
            }
            for (int64_t k = 0; k < in; k += kStrip) {
                const int64_t depth = least(kStrip, in - k);
                own.unpack_outputs(in, first, k, depth, kStrip, unpacked);
                multiply(worker, input.x + k, input.stride, unpacked, kStrip * kLanes, depth, rows, groups,
                         sums + i * kOutBlock, kTaskOut, Extra{k > 0});
            }
        }
        if (!worker.may_write()) return;
        for (int64_t row = 0; row < rows; ++row) finish(row, sums + row * kTaskOut);
    }
};

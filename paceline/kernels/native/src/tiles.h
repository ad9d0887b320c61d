// Matrix products by tiles of AMX.

// Whether tiles multiply sixteen rows of x at the cost of a few rows.
template <class T>
constexpr bool kTiles = false;

#ifdef PACELINE_AMX
template <>
constexpr bool kTiles<bf16> = true;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The compiler does not know which memory tile instructions read. So all writes must be done before them.
static inline void finish_writes() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 are the sums of row blocks 0 0 1 1 and groups 0 1 0 1; tiles 4 and 5 are x, 6 and 7 weights.
static inline void configure_tiles(Worker& worker, int rows) {
    if (worker.tile_rows == rows) return;
    worker.tile_rows = rows;
    const uint8_t first = rows < 16 ? rows : 16, second = rows > 16 ? rows - 16 : 1;
    const uint8_t tile_rows[8] = {first, first, second, second, first, second, 16, 16};
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = tile_rows[tile], config.row_bytes[tile] = 64;
    finish_writes();
    _tile_loadconfig(&config);
}

// The same for products with the weights on the left: the tiles of sums and x have `columns` columns, one per row of x.
static inline void configure_columns(Worker& worker, int columns) {
    if (worker.tile_rows == -columns) return;
    worker.tile_rows = -columns;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile)
        config.rows[tile] = 16, config.row_bytes[tile] = static_cast<uint16_t>(tile < 6 ? 4 * columns : 64);
    finish_writes();
    _tile_loadconfig(&config);
}

static inline void prefetch_weights(const void* weights) {
    const char* ahead = static_cast<const char*>(weights) + kAheadOfTiles;
    for (int64_t line = 0; line < 16; ++line) _mm_prefetch(ahead + line * 64, _MM_HINT_T0);
}

// sums += x * weights, for tiles with these numbers. Bytes are signed.
#define PACELINE_TILE_PRODUCT(SUMS, X, WEIGHTS)                        \
    if constexpr (kIsBytes<T>) _tile_dpbssd(SUMS, X, WEIGHTS);         \
    else _tile_dpbf16ps(SUMS, X, WEIGHTS)

// A tile product takes 32 values (or pairs of bytes) along `in` at once. A row's sum does not depend on the number of rows in
// the tile.
template <bool TwoRowBlocks, bool TwoGroups, class T>
static inline void multiply_tiles(
    const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t in, float* out, int64_t out_stride,
    const Extra& extra) {
    const T* x2 = x + 16 * x_stride;
    const T* w2 = w + w_stride;
    float* out2 = out + 16 * out_stride;
    const char* ahead = extra.ahead;
    if (extra.add) {
        _tile_loadd(0, out, out_stride * 4);
        if (TwoGroups) _tile_loadd(1, out + kLanes, out_stride * 4);
        if (TwoRowBlocks) _tile_loadd(2, out2, out_stride * 4);
        if (TwoRowBlocks && TwoGroups) _tile_loadd(3, out2 + kLanes, out_stride * 4);
    } else {
        _tile_zero(0);
        if (TwoGroups) _tile_zero(1);
        if (TwoRowBlocks) _tile_zero(2);
        if (TwoRowBlocks && TwoGroups) _tile_zero(3);
    }
    for (int64_t k = 0; k < in; k += kDepth) {
        _tile_loadd(4, x + k, x_stride * 2);
        _tile_loadd(6, w + k * kLanes, 64);
        PACELINE_TILE_PRODUCT(0, 4, 6);
        if (TwoGroups) {
            _tile_loadd(7, w2 + k * kLanes, 64);
            PACELINE_TILE_PRODUCT(1, 4, 7);
        }
        if (TwoRowBlocks) {
            _tile_loadd(5, x2 + k, x_stride * 2);
            PACELINE_TILE_PRODUCT(2, 5, 6);
            if constexpr (TwoGroups) PACELINE_TILE_PRODUCT(3, 5, 7);
        }
        for (int64_t i = 0; i < extra.lines; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        if (!TwoRowBlocks && extra.comes_from_memory && !extra.lines) {
            prefetch_weights(w + k * kLanes);
            if (TwoGroups) prefetch_weights(w2 + k * kLanes);
        }
    }
    _tile_stored(0, out, out_stride * 4);
    if (TwoGroups) _tile_stored(1, out + kLanes, out_stride * 4);
    if (TwoRowBlocks) _tile_stored(2, out2, out_stride * 4);
    if (TwoRowBlocks && TwoGroups) _tile_stored(3, out2 + kLanes, out_stride * 4);
}

template <class T>
static inline void multiply_by_tiles(
    Worker& worker, const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t in, int64_t rows, int64_t groups,
    float* out, int64_t out_stride, const Extra& extra) {
    configure_tiles(worker, static_cast<int>(rows));
    finish_writes();
    const auto tiles = rows > 16 ? (groups == 2 ? multiply_tiles<true, true, T> : multiply_tiles<true, false, T>)
                                 : (groups == 2 ? multiply_tiles<false, true, T> : multiply_tiles<false, false, T>);
    tiles(x, x_stride, w, w_stride, in, out, out_stride, extra);
}
#undef PACELINE_TILE_PRODUCT
static inline void multiply(
    Worker& worker, const bf16* x, int64_t x_stride, const bf16* w, int64_t w_stride, int64_t in, int64_t rows,
    int64_t groups, float* out, int64_t out_stride, const Extra& extra = {}) {
    multiply_by_tiles(worker, x, x_stride, w, w_stride, in, rows, groups, out, out_stride, extra);
}
static inline void multiply(
    Worker& worker, const FusedBytes* x, int64_t x_stride, const FusedBytes* w, int64_t w_stride, int64_t in, int64_t rows,
    int64_t groups, float* out, int64_t out_stride, const Extra& extra = {}) {
    multiply_by_tiles(worker, x, x_stride, w, w_stride, in, rows, groups, out, out_stride, extra);
}
#endif

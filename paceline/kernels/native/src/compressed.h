// Matrices of bf16 in 12 bits; see kFormatCompressed of program.h. They become packed weights in registers, with about
// ten instructions for 64 weights, and are added up in the same order.

constexpr int64_t kAheadOfParts = 8192;  // bytes by which parts are prefetched

// Bypasses the L2 cache: parts are read only once, and other data of the core should stay there.
static inline void fetch_parts(const uint8_t* parts, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(parts + kAheadOfParts + line, 0, 0);
}

// Decodes parts to rows of packed weights.
struct Decoder {
    __m512i high, low;

    explicit Decoder(const ExponentTable& table) : high(repeat(table.high)), low(repeat(table.low)) {}

    // Decodes two of the four rows of a part.
    void operator()(const uint8_t* part, int half, u32x16 (&rows)[2]) const {
        const __m512i nibbles = _mm512_set1_epi8(15), signs = _mm512_set1_epi8(-128);
        const __m512i codes = _mm512_and_si512(read<__m512i>(part) >> (4 * half), nibbles);
        const __m512i rest = read<__m512i>(part + 64 + 64 * half);
        // table | (rest & signs), and table | (rest & ~signs)
        const __m512i upper = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(high, codes), rest, signs, 0xf8);
        const __m512i lower = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(low, codes), rest, signs, 0xf4);
        rows[0] = bits<u32x16>(_mm512_unpacklo_epi8(lower, upper));
        rows[1] = bits<u32x16>(_mm512_unpackhi_epi8(lower, upper));
    }

    // Unpacks a tile, whose parts are `stride` apart, without its exceptions.
    void unpack(const uint8_t* parts, int64_t stride, bf16* to) const {
        for (int i = 0; i < 2 * kTileParts; ++i) {
            u32x16 rows[2];
            (*this)(parts + i / 2 * stride, i % 2, rows);
            memcpy(to + i * 2 * kDepth, rows, sizeof(rows));
        }
    }

private:
    static __m512i repeat(const uint8_t (&bytes)[16]) {
        return _mm512_maskz_broadcast_i32x4(0xffff, read<__m128i>(bytes));
    }
};

// A matrix [outputs, in].
struct Compressed {
    static constexpr int64_t kMostOut = kTaskOut;  // outputs of one task
    static constexpr Columns kColumns = {8, kRowBlock};

    const uint8_t* parts;
    const ExponentTable* table;
    const uint32_t* starts;
    const Exception* exceptions;
    int64_t outputs;

    static Compressed of(const void* data, const Op& op) {
        const CompressedLayout layout(op.n1, op.n0);
        const uint8_t* bytes = static_cast<const uint8_t*>(data);
        return {bytes, reinterpret_cast<const ExponentTable*>(bytes + layout.table),
                reinterpret_cast<const uint32_t*>(bytes + layout.starts),
                reinterpret_cast<const Exception*>(bytes + layout.exceptions), op.n1};
    }
    static int64_t depth(int64_t in) { return round_up(in, kDepth); }
    static Columns columns(const Op&) { return kColumns; }
    static Input<bf16> input(const Op& op, const Step& step, Team& team, const Columns& columns) {
        return input_of<bf16>(op, step, team, depth(op.n0), columns);
    }

    int64_t groups(int64_t first) const { return outputs - first > kLanes ? 2 : 1; }

    // The parts of kOutBlock outputs, and their next exception.
    struct Block {
        const uint8_t* parts;
        const Exception* next;
        uint32_t first_tile, groups;

        uint32_t next_tile() const { return next->tile - first_tile; }
    };
    Block block(int64_t in, int64_t first) const {
        const int64_t tile = first / kLanes * (in / kDepth);
        return {parts + tile * kTileParts * kPartBytes, exceptions + starts[first / kOutBlock],
                static_cast<uint32_t>(tile), static_cast<uint32_t>(groups(first))};
    }

    // Unpacks the weights of kOutBlock outputs to [groups][in][16].
    void unpack(int64_t in, int64_t first, bf16* to) const {
        Block own = block(in, first);
        const Decoder decode(*table);
        const int64_t stride = own.groups * kPartBytes;
        const auto tile = [&](int64_t group, int64_t depth) { return to + (group * in + depth * kDepth) * kLanes; };
        for (int64_t depth = 0; depth < in / kDepth; ++depth, own.parts += kTileParts * stride) {
            fetch_parts(own.parts, kTileParts * stride);
            for (int64_t group = 0; group < own.groups; ++group)
                decode.unpack(own.parts + group * kPartBytes, stride, tile(group, depth));
        }
        for (; own.next_tile() < in / kDepth * own.groups; ++own.next)
            tile(own.next_tile() % own.groups, own.next_tile() / own.groups)[own.next->place] = own.next->weight;
    }

    const bf16* sixteen(int64_t first, int64_t in, Worker& worker) const {
        bf16* packed = static_cast<bf16*>(worker.scratch.take(kOutBlock * in * sizeof(bf16)));
        unpack(in, first / kOutBlock * kOutBlock, packed);
        return packed + first % kOutBlock * in;
    }

    // Computes the sums of a block for x [in / 2][Rows][2]; `out`: [Rows][kTaskOut].
    template <int Rows, int Groups>
    void multiply_columns(Block own, const bf16* x, int64_t in, bool fetches, float* out) const {
        constexpr int64_t stride = Groups * kPartBytes;
        const Decoder decode(*table);
        f32x16 sums[Rows][Groups] = {};
        // Adds the products of two pairs of values along `in`.
        const auto add = [&](const bf16* pairs, const u32x16 (&weights)[Groups][2]) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair)
#pragma GCC unroll 8
                for (int row = 0; row < Rows; ++row) {
                    const u32x16 both = read<uint32_t>(pairs + 2 * (pair * Rows + row)) + u32x16{};
#pragma GCC unroll 2
                    for (int group = 0; group < Groups; ++group)
                        sums[row][group] = dot_pairs(both, weights[group][pair], sums[row][group]);
                }
        };
        const int64_t end = in / kDepth;
        for (int64_t depth = 0; depth < end; ++depth) {
            // Up to the next exception, weights stay in registers.
            const int64_t whole = least(end, own.next_tile() / Groups);
            for (int64_t i = depth * kTileParts; i < whole * kTileParts; ++i, own.parts += stride, x += 8 * Rows) {
                if (fetches) fetch_parts(own.parts, stride);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    u32x16 weights[Groups][2];
#pragma GCC unroll 2
                    for (int group = 0; group < Groups; ++group)
                        decode(own.parts + group * kPartBytes, half, weights[group]);
                    add(x + 4 * half * Rows, weights);
                }
            }
            depth = whole;
            if (depth == end) break;
            alignas(64) bf16 tiles[Groups][kTileWeights];
            for (int group = 0; group < Groups; ++group)
                decode.unpack(own.parts + group * kPartBytes, stride, tiles[group]);
            for (; own.next_tile() / Groups == depth; ++own.next)
                tiles[own.next_tile() % Groups][own.next->place] = own.next->weight;
            for (int64_t row = 0; row < kDepth / 2; row += 2) {
                u32x16 weights[Groups][2];
                for (int group = 0; group < Groups; ++group)
                    memcpy(weights[group], tiles[group] + row * kDepth, sizeof(weights[group]));
                add(x + 2 * row * Rows, weights);
            }
            own.parts += kTileParts * stride, x += kDepth * Rows;
        }
        for (int row = 0; row < Rows; ++row)
            for (int group = 0; group < Groups; ++group)
                store(out + row * kTaskOut + group * kLanes, sums[row][group]);
    }

    // The same for any number of rows up to kColumns.block.
    void multiply_few(const Block& own, const bf16* x, int64_t in, int64_t rows, bool fetches, float* out) const {
        switch (rows) {
#define PACELINE_ROWS(N)                                                                     \
    case N:                                                                                  \
        if (own.groups == 2) return multiply_columns<N, 2>(own, x, in, fetches, out);        \
        return multiply_columns<N, 1>(own, x, in, fetches, out);
            PACELINE_ROWS(1) PACELINE_ROWS(2) PACELINE_ROWS(3) PACELINE_ROWS(4)
            PACELINE_ROWS(5) PACELINE_ROWS(6) PACELINE_ROWS(7) PACELINE_ROWS(8)
#undef PACELINE_ROWS
        }
    }

    // Calls finish(row, sums) for the rows of a chunk and up to kTaskOut outputs, in order. For many rows, all weights
    // are unpacked once.
    template <class Finish>
    static void multiply_slices(const Input<bf16>& input, Worker& worker, int64_t chunk, const Slice<Compressed>* slices,
                                int64_t count, const Finish& finish) {
        const int64_t in = input.in, rows = input.rows;
        if (!input.columns) {
            bf16* unpacked = static_cast<bf16*>(worker.scratch.take(count * kOutBlock * in * sizeof(bf16)));
            Panel<bf16> panels[kTaskOut / kOutBlock];
            for (int64_t i = 0; i < count; ++i, unpacked += kOutBlock * in) {
                slices[i].matrix->unpack(in, slices[i].first, unpacked);
                panels[i] = {unpacked, nullptr, slices[i].matrix->groups(slices[i].first), false};
            }
            return input.multiply_chunk(worker, chunk, panels, count, finish);
        }
        alignas(64) float sums[kRowBlock * kTaskOut];
        for (int64_t i = 0; i < count; ++i) {
            const Compressed& matrix = *slices[i].matrix;
            const Block own = matrix.block(in, slices[i].first);
            for (int64_t row = 0; row < rows; row += kColumns.block)
                matrix.multiply_few(own, input.columns + row * in, in, least(kColumns.block, rows - row), row == 0,
                                    sums + row * kTaskOut + i * kOutBlock);
        }
        if (!worker.may_write()) return;
        for (int64_t row = 0; row < rows; ++row) finish(row, sums + row * kTaskOut);
    }
};

// Products of bf16 with quantized weights in integers, for the instruction sets of x86 without matrix tiles. With products
// of bf16, integers are faster for few rows (2.5 times for one), because codes need no unpacking, and slower for prompts.
//
// Each block of 32 values of x is rounded to 16-bit integers that share a scale, a power of two. So a number of bf16 is
// not changed unless it is smaller than 1/128 of its block's largest one. Codes of weights are integers too, so a block's
// sum is exact, and is the same for any order and any instruction. Weights are not rounded. Results differ from those of
// unpacked weights in the last bits, because unpacking rounds weights to bf16.

// The scale of a block of x, and the sums of its two halves: of the numbers, and of the integers.
struct BlockOfX {
    float scale, sums[2];
    int32_t whole_sums[2];
};

// Rows of x as integers. x: [rows][in]; blocks: [rows][in / kDepth].
struct IntegerInput : Chunks {
    const int16_t* x;
    const BlockOfX* blocks;
    int64_t in;
};

// Blocks whose largest value is below this count as zeros, because the factor of smaller ones is no finite number.
constexpr float kLeastOfBlock = 0x1p-100f;

// Rounds kDepth values. An infinite value or NaN makes the scale NaN, and so all results.
static inline BlockOfX round_block(const float* x, int16_t* to) {
    const f32x16 values[2] = {load(x), load(x + kLanes)};
    const auto magnitude = [](f32x16 v) { return bits<f32x16>(bits<u32x16>(v) & 0x7fffffffu); };
    float largest = max_lane(max(magnitude(values[0]), magnitude(values[1])));
    uint32_t word;
    memcpy(&word, &largest, sizeof(word));
    word &= 0x7f800000u;  // the power of two that is not above the largest value
    memcpy(&largest, &word, sizeof(word));
    const float nan_if_not_finite = sum_lanes(values[0] * 0.0f + values[1] * 0.0f);
    BlockOfX block{largest * 0x1p-14f + nan_if_not_finite, {}, {}};
    const float factor = largest >= kLeastOfBlock ? 0x1p14f / largest : 0.0f;
    for (int half = 0; half < 2; ++half) {
        // The sum with this number has no bits for fractions, so it is rounded to the nearest integer.
        const f32x16 shifted = values[half] * factor + 0x1.8p23f;
        const f32x16 rounded = shifted - 0x1.8p23f;
        write(to + half * kLanes, convert<Vector<int16_t, kLanes>>(bits<i32x16>(shifted)));
        const float sum = sum_lanes(rounded);  // exact
        block.sums[half] = block.scale * sum;
        block.whole_sums[half] = static_cast<int32_t>(sum);
    }
    return block;
}

// Rounds the first `count` values of a row, and zeros after them up to whole blocks.
template <class T>
static void round_row(const T* row, int64_t count, int16_t* to, BlockOfX* blocks) {
    for (int64_t k = 0; k < count; k += kDepth) {
        alignas(64) float values[kDepth] = {};
        copy_values(row + k, least(kDepth, count - k), values);
        blocks[k / kDepth] = round_block(values, to + k);
    }
}

template <class T>
static IntegerInput integers_of(const Op& op, const Step& step, Team& team) {
    const int64_t rows = op.rows * step.tokens, count = op.n0, stride = op.n2;
    const int64_t in = round_up(count, kDepth), depth = in / kDepth;
    auto* memory = static_cast<int16_t*>(team.shared(rows * (in * sizeof(int16_t) + depth * sizeof(BlockOfX))));
    auto* blocks = reinterpret_cast<BlockOfX*>(memory + rows * in);
    const T* x = static_cast<const T*>(op.a);
    for_each_row(team, rows, in, [&](int64_t row) {
        round_row(x + row * stride, count, memory + row * in, blocks + row * depth);
    });
    return {Chunks(rows, in * sizeof(int16_t)), memory, blocks, in};
}

using Shorts = Vector<int16_t, 2 * kRegisterLanes>;
using Ints = Vector<int32_t, kRegisterLanes>;

// Repeats a pair of values of x, and adds its products with the pair of each lane. As in `Products`, the compiler must keep
// this order. Otherwise it computes all products before it adds them, and keeps them in memory.
PACELINE_INLINE Shorts repeat_pair(const int16_t* x) {
    Shorts repeated;
    asm volatile("vpbroadcastd %1, %0" : "=v"(repeated) : "m"(*reinterpret_cast<const int16_t(*)[2]>(x)));
    return repeated;
}
template <bool Fused>
PACELINE_INLINE void add_pairs(const Shorts& x, const Shorts& weights, Ints& sum) {
    if constexpr (Fused) {
        asm volatile(PACELINE_VEX "vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weights));
    } else {
        Ints product;
        asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(x), "v"(weights));
    }
}

// Returns whether this processor multiplies and adds pairs in one instruction. The result is the same.
static inline bool fuses_pairs() {
#ifdef PACELINE_AVX512
    return __builtin_cpu_supports("avx512vnni");
#else
    return __builtin_cpu_supports("avxvnni");
#endif
}

// The codes of one tile for a pair of values along `in`. at: those of the outputs of one register.
struct ByteCodes {
    const uint8_t* codes;
    Shorts at(int64_t pair, int part) const {
        constexpr int count = Shape<Shorts>::kCount;
        return convert<Shorts>(read<Vector<int8_t, count>>(codes + pair * 32 + part * count));
    }
};
// `Width` bits of each code, as in `Plane` of codes.h.
template <int Width>
PACELINE_INLINE Vector<uint16_t, Shape<Shorts>::kCount> read_plane(const uint8_t* codes, int64_t pair, int part) {
    using Words16 = Vector<uint16_t, Shape<Shorts>::kCount>;
    const auto words = read<Words16>(codes + pair * Width / 16 * 64 + part * kRegisterBytes);
    return words >> static_cast<uint16_t>(pair * Width % 16) & static_cast<uint16_t>((1 << Width) - 1);
}
template <int Bits>
struct BitPlanesCodes {
    const uint8_t* codes;
    Shorts at(int64_t pair, int part) const {
        constexpr int low_bits = Bits < 4 ? 2 : 4;
        const auto low = read_plane<low_bits>(codes, pair, part);
        if constexpr (Bits == low_bits) return bits<Shorts>(low);
        else return bits<Shorts>(low | read_plane<Bits - low_bits>(codes + low_bits * 64, pair, part) << low_bits);
    }
};
// Places in a table of whole numbers.
struct TableCodes {
    const uint8_t* codes;
    const Head* head;
    Shorts at(int64_t pair, int part) const {
        const auto words = read<Shorts>(codes + pair / 4 * 64 + part * kRegisterBytes);
#ifdef PACELINE_AVX512
        // The table is there twice, because the instruction reads a fifth bit.
        const __m512i places = bits<__m512i>(bits<Vector<uint16_t, 32>>(words) >> static_cast<uint16_t>(pair % 4 * 4));
        return bits<Shorts>(_mm512_maskz_permutexvar_epi16(0xffffffff, places, read<__m512i>(head->whole)));
#else
        const __m256i places = bits<__m256i>(bits<Vector<uint16_t, 16>>(words) >> static_cast<uint16_t>(pair % 4 * 4) & 15);
        const __m256i found = _mm256_shuffle_epi8(read<__m256i>(head->bytes), places);
        return bits<Shorts>(_mm256_srai_epi16(_mm256_slli_epi16(found, 8), 8));
#endif
    }
};

// Rows whose sums are in registers at once, of one group of outputs; for many rows, those of kStripGroups groups.
#if defined(PACELINE_AVX512)
constexpr int kMostIntegerRows = 8, kMostStripRows = 6, kStripGroups = 2;
#else
constexpr int kMostIntegerRows = 4, kMostStripRows = 4, kStripGroups = 1;
#endif
constexpr int64_t kStripBlocks = 8;  // blocks along `in` whose integers stay in a core's L1 cache

// A matrix [outputs, in].
struct QuantizedIntegers : Quantized<bf16> {
    static QuantizedIntegers of(const void* data, const Op& op) { return {Quantized<bf16>::of(data, op)}; }
    static IntegerInput input(const Op& op, const Step& step, Team& team, const Columns&) {
        return integers_of<bf16>(op, step, team);
    }

    // `Count` scales of each output of a block, and as many offsets.
    template <int Count>
    struct Scales {
        alignas(64) float scales[Count][kLanes], offsets[Count][kLanes];

        Scales() = default;
        Scales(const TileLayout::Block& block, const TileLayout& layout) {
            for (int i = 0; i < Count; ++i) {
                f32x16 scale = {}, offset = {};
                load_part(block, layout, i, scale, offset);
                store(scales[i], layout.halves ? scale * 0.5f : scale);
                store(offsets[i], offset);
            }
        }

        // Returns the sum of a row after a block. products: the sums of each part of the block.
        PACELINE_INLINED Floats add(const Ints (&products)[Count], int lane, const BlockOfX& x, bool has_offsets,
                                    const Floats& before) const {
            const auto scale = [&](int part) PACELINE_INLINED { return read<Floats>(scales[part] + lane); };
            Floats sum;
            if constexpr (Count == 1) {
                sum = fma(convert<Floats>(products[0]), scale(0) * x.scale, before);
            } else {
                const Floats first = convert<Floats>(products[0]) * scale(0);
                sum = fma(fma(convert<Floats>(products[1]), scale(1), first), splat<Floats>(x.scale), before);
            }
            if (!has_offsets) return sum;
            if constexpr (Count == 1)
                return fma(read<Floats>(offsets[0] + lane), splat<Floats>(x.sums[0] + x.sums[1]), sum);
            const Floats both = fma(read<Floats>(offsets[0] + lane), splat<Floats>(x.sums[0]), sum);
            return fma(read<Floats>(offsets[Count - 1] + lane), splat<Floats>(x.sums[1]), both);
        }
    };

    // Returns what the sum of a part of a block begins with, because codes are `zero` more than their values.
    template <int Count>
    static Ints begin_sum(const BlockOfX& x, int part, int32_t zero) {
        return splat<Ints>(-zero * (Count == 1 ? x.whole_sums[0] + x.whole_sums[1] : x.whole_sums[part]));
    }
    int32_t zero() const { return static_cast<int32_t>(layout.zero()); }

    // Adds the products of one tile's block to `sums`, [Rows][kTaskOut].
    template <bool Fused, int Rows, int Count, class Codes>
    void multiply_tile(const Codes& codes, const Scales<Count>& own, const IntegerInput& input, int64_t row, int64_t block,
                       float* sums) const {
        const int64_t depth = input.in / kDepth;
        const int16_t* x = input.x + row * input.in + block * kDepth;
        const BlockOfX* blocks = input.blocks + row * depth + block;
        constexpr int pairs = kDepth / 2 / Count;  // pairs of values with one scale
        const int32_t zero = this->zero();
        Ints products[Rows * kParts][Count];
        for (int half = 0; half < Count; ++half) {
            Ints own_products[Rows * kParts];
            unrolled<Rows * kParts>([&](int i) PACELINE_INLINED {
                own_products[i] = begin_sum<Count>(blocks[i / kParts * depth], half, zero);
            });
            for (int first = half * pairs; first < (half + 1) * pairs; first += 4)
                unrolled<4>([&](int i) PACELINE_INLINED {
                    Shorts weights[kParts];
                    unrolled<kParts>([&](int part) PACELINE_INLINED { weights[part] = codes.at(first + i, part); });
                    unrolled<Rows>([&](int r) PACELINE_INLINED {
                        const Shorts pair = repeat_pair(x + r * input.in + (first + i) * 2);
                        unrolled<kParts>([&](int part) PACELINE_INLINED {
                            add_pairs<Fused>(pair, weights[part], own_products[r * kParts + part]);
                        });
                    });
                });
            unrolled<Rows * kParts>([&](int i) PACELINE_INLINED { products[i][half] = own_products[i]; });
        }
        unrolled<Rows * kParts>([&](int i) PACELINE_INLINED {
            const int lane = i % kParts * kRegisterLanes;
            float* to = sums + i / kParts * kTaskOut + lane;
            write(to, own.add(products[i], lane, blocks[i / kParts * depth], layout.offsets, read<Floats>(to)));
        });
    }

    // Integers and scales of kStripBlocks blocks of two groups of outputs.
    template <int Count>
    struct Strip {
        alignas(64) int16_t codes[kStripBlocks][2][kLanes * kDepth];
        Scales<Count> scales[kStripBlocks][2];
    };

    // Adds the products of a strip's first `count` blocks to `sums`, [Rows][kTaskOut]. The same arithmetic as that of tiles.
    template <bool Fused, int Rows, int Count>
    void multiply_strip(const Strip<Count>& strip, int64_t count, int64_t group, const IntegerInput& input, int64_t row,
                        int64_t block, float* sums) const {
        constexpr int parts = kStripGroups * kParts, pairs = kDepth / 2 / Count;
        const int64_t depth = input.in / kDepth;
        const int16_t* x = input.x + row * input.in + block * kDepth;
        const BlockOfX* blocks = input.blocks + row * depth + block;
        const int32_t zero = this->zero();
        const auto place = [=](int i) { return sums + i / parts * kTaskOut + i % parts * kRegisterLanes; };
        Floats all[Rows * parts];
        unrolled<Rows * parts>([&](int i) PACELINE_INLINED { all[i] = read<Floats>(place(i)); });
        for (int64_t b = 0; b < count; ++b, x += kDepth, ++blocks) {
            Ints products[Rows * parts][Count];
            for (int half = 0; half < Count; ++half) {
                Ints own[Rows * parts];
                unrolled<Rows * parts>([&](int i) PACELINE_INLINED {
                    own[i] = begin_sum<Count>(blocks[i / parts * depth], half, zero);
                });
                const int16_t* from = strip.codes[b][group] + half * pairs * 32;
                for (int first = 0; first < pairs; first += 4)
                    unrolled<4>([&](int i) PACELINE_INLINED {
                        Shorts weights[parts];
                        unrolled<parts>([&](int part) PACELINE_INLINED {
                            weights[part] = read<Shorts>(from + part / kParts * kLanes * kDepth + (first + i) * 32 +
                                                         part % kParts * Shape<Shorts>::kCount);
                        });
                        unrolled<Rows>([&](int r) PACELINE_INLINED {
                            const Shorts pair = repeat_pair(x + r * input.in + (half * pairs + first + i) * 2);
                            unrolled<parts>([&](int part) PACELINE_INLINED {
                                add_pairs<Fused>(pair, weights[part], own[r * parts + part]);
                            });
                        });
                    });
                unrolled<Rows * parts>([&](int i) PACELINE_INLINED { products[i][half] = own[i]; });
            }
            unrolled<Rows * parts>([&](int i) PACELINE_INLINED {
                const Scales<Count>& scales = strip.scales[b][group + i % parts / kParts];
                all[i] = scales.add(products[i], i % kParts * kRegisterLanes, blocks[i / parts * depth], layout.offsets, all[i]);
            });
        }
        unrolled<Rows * parts>([&](int i) PACELINE_INLINED { write(place(i), all[i]); });
    }

    template <class Codes>
    Codes codes_of(const uint8_t* codes) const {
        if constexpr (std::is_same_v<Codes, TableCodes>) return {codes, layout.head};
        else return {codes};
    }

    // Computes the sums of kOutBlock outputs, [rows][kTaskOut]. Codes of few rows become integers in registers. For many rows,
    // those of a strip are unpacked once.
    template <bool Fused, class Codes, int Count>
    void multiply_rows(const IntegerInput& input, int64_t first, int64_t row, int64_t rows, float* sums) const {
        const int64_t bytes = layout.tile_bytes(), count = groups(first), depth = input.in / kDepth;
        const int64_t bytes_of_block = bytes >> layout.span;
        const uint8_t* from = tiles + first / kLanes * layout.tiles(input.in) * bytes;
        for (int64_t i = 0; i < rows; ++i) memset(sums + i * kTaskOut, 0, kOutBlock * sizeof(float));
        Strip<Count> strip;
        for (int64_t block = 0; block < depth; ++block) {
            const int64_t place_in_strip = block % kStripBlocks;
            for (int64_t group = 0; group < count; ++group) {
                const TileLayout::Block place = layout.block(from + group * bytes, count, block);
                prefetch_tile(place.codes, bytes_of_block);
                const Codes codes = codes_of<Codes>(place.codes);
                if (rows <= kMostIntegerRows) {
                    const Scales<Count> own(place, layout);
                    by_parts<kMostIntegerRows>(rows, [&](auto height, int64_t) PACELINE_INLINED {
                        multiply_tile<Fused, decltype(height)::value>(codes, own, input, row, block, sums + group * kLanes);
                    });
                    continue;
                }
                strip.scales[place_in_strip][group] = Scales<Count>(place, layout);
                int16_t* unpacked = strip.codes[place_in_strip][group];
                unrolled<kDepth / 2 * kParts>([&](int i) PACELINE_INLINED {
                    write(unpacked + i * Shape<Shorts>::kCount, codes.at(i / kParts, i % kParts));
                });
            }
            if (rows <= kMostIntegerRows || (place_in_strip + 1 < kStripBlocks && block + 1 < depth)) continue;
            // If one group of outputs remains, the sums of the other one count for nothing.
            for (int64_t group = 0; group < count; group += kStripGroups)
                by_parts<kMostStripRows>(rows, [&](auto height, int64_t part) PACELINE_INLINED {
                    multiply_strip<Fused, decltype(height)::value>(strip, place_in_strip + 1, group, input, row + part,
                                                                   block - place_in_strip,
                                                                   sums + part * kTaskOut + group * kLanes);
                });
        }
    }

    // The same for the format of this matrix.
    template <bool Fused>
    void multiply_format(const IntegerInput& input, int64_t first, int64_t row, int64_t rows, float* sums) const {
        if (layout.table) multiply_codes<Fused, TableCodes>(input, first, row, rows, sums);
        else if (layout.bits == 8) multiply_codes<Fused, ByteCodes>(input, first, row, rows, sums);
        else if (layout.bits == 6) multiply_codes<Fused, BitPlanesCodes<6>>(input, first, row, rows, sums);
        else if (layout.bits == 5) multiply_codes<Fused, BitPlanesCodes<5>>(input, first, row, rows, sums);
        else if (layout.bits == 3) multiply_codes<Fused, BitPlanesCodes<3>>(input, first, row, rows, sums);
        else if (layout.bits == 2) multiply_codes<Fused, BitPlanesCodes<2>>(input, first, row, rows, sums);
        else multiply_codes<Fused, BitPlanesCodes<4>>(input, first, row, rows, sums);
    }
    template <bool Fused, class Codes>
    void multiply_codes(const IntegerInput& input, int64_t first, int64_t row, int64_t rows, float* sums) const {
        if (layout.scales_per_block == 2) multiply_rows<Fused, Codes, 2>(input, first, row, rows, sums);
        else multiply_rows<Fused, Codes, 1>(input, first, row, rows, sums);
    }

    // The same with the instructions of this processor.
    void multiply(const IntegerInput& input, int64_t first, int64_t row, int64_t rows, float* sums) const {
        if (fuses_pairs()) multiply_format<true>(input, first, row, rows, sums);
        else multiply_format<false>(input, first, row, rows, sums);
    }

    // Calls finish(row, sums) for the rows of a chunk and up to kTaskOut outputs, in order.
    template <class Finish>
    static void multiply_slices(const IntegerInput& input, Worker& worker, int64_t chunk,
                                const Slice<QuantizedIntegers>* slices, int64_t count, const Finish& finish) {
        alignas(64) float few[kRowBlock * kTaskOut];
        const int64_t begin = input.begin_of(chunk), rows = input.end_of(chunk) - begin;
        float* sums = few;
        if (rows > kRowBlock) sums = static_cast<float*>(worker.scratch.take(rows * kTaskOut * sizeof(float)));
        for (int64_t i = 0; i < count; ++i)
            slices[i].matrix->multiply(input, slices[i].first, begin, rows, sums + i * kOutBlock);
        if (!worker.may_write()) return;
        for (int64_t i = 0; i < rows; ++i) finish(begin + i, sums + i * kTaskOut);
    }
};

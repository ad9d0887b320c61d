// Plain loops of one instruction set, as upper bounds for the rates of reading and computing on a core. See floors.py.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

constexpr int kBytes = __BIGGEST_ALIGNMENT__;  // of a register
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;  // of 32 registers
#else
constexpr int kSums = 12;  // of 16
#endif

typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));

// Adds products to many independent sums, `loops` times. Returns the number of operations.
template <class Sum, class Add>
static double compute(int64_t loops, double operations, const Add& add) {
    Sum sums[kSums] = {};
    for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 24
        for (int j = 0; j < kSums; ++j) {
            add(sums[j]);
#if defined(__x86_64__)
            asm volatile("" : "+v"(sums[j]));
#else
            asm volatile("" : "+w"(sums[j]));
#endif
        }
    }
    return operations * kSums * loops;
}

extern "C" {

// Reads memory in order. Returns a value that depends on all of it.
int32_t read_all(const char* data, int64_t bytes) {
    Ints sums[4] = {};
    for (int64_t i = 0; i + 4 * kBytes <= bytes; i += 4 * kBytes)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            Ints own;
            std::memcpy(&own, data + i + j * kBytes, kBytes);
            sums[j] += own;
        }
    const Ints sum = sums[0] + sums[1] + sums[2] + sums[3];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

// Reads blocks of memory in their order, with the start of the next block prefetched.
int32_t read_blocks(const char* const* blocks, int64_t count, int64_t bytes) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (i + 1 < count)
            for (int64_t line = 0; line < bytes && line < 2048; line += 64) __builtin_prefetch(blocks[i + 1] + line);
        sum += read_all(blocks[i], bytes);
    }
    return sum;
}

// The functions below return the number of operations, or 0 if the instruction set has no such instructions.

double compute_fp32(int64_t loops) {
    Floats a = Floats{} + 1.0f, b = Floats{} + 1e-20f;
    return compute<Floats>(loops, 2.0 * kBytes / 4, [=](Floats& sum) { sum += a * b; });
}

#if defined(__AMX_TILE__)
static void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    alignas(64) static const char zeros[1024] = {};
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(5, zeros, 64);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
}
#endif

double compute_bf16(int64_t loops) {
#if defined(__AMX_BF16__)
    configure_tiles();
    for (int64_t i = 0; i < loops; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 16 * 16 * 32 * 2 * loops;
#elif defined(__AVX512BF16__)
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1)), b = a;
    return compute<__m512>(loops, 64, [=](__m512& sum) { sum = _mm512_dpbf16_ps(sum, a, b); });
#elif defined(__ARM_FEATURE_BF16)
    const bfloat16x8_t a = vdupq_n_bf16(vcvth_bf16_f32(1.0f)), b = a;
    return compute<float32x4_t>(loops, 16, [=](float32x4_t& sum) { sum = vbfdotq_f32(sum, a, b); });
#else
    (void)loops;
    return 0;
#endif
}

// Pairs of 16-bit integers.
double compute_pairs(int64_t loops) {
#if defined(__AVX2__)
    const Ints a = Ints{} + 0x00010001, b = Ints{} + 0x00020003;
    return compute<Ints>(loops, kBytes, [=](Ints& sum) {
#if defined(__AVX512VNNI__)
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVXVNNI__)
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
        Ints product;
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(a), "v"(b));
#endif
    });
#else
    (void)loops;
    return 0;
#endif
}

// Fours of signed bytes.
double compute_bytes(int64_t loops) {
#if defined(__AMX_INT8__)
    configure_tiles();
    for (int64_t i = 0; i < loops; ++i) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 16 * 16 * 64 * 2 * loops;
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    const Ints a = Ints{} + 0x01010101, b = Ints{} + 0x01020301;
    return compute<Ints>(loops, 2.0 * kBytes, [=](Ints& sum) {
#if defined(__AVX512VNNI__)
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#endif
    });
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t a = vdupq_n_s8(1), b = a;
    return compute<int32x4_t>(loops, 32, [=](int32x4_t& sum) { sum = vdotq_s32(sum, a, b); });
#elif defined(__AVX2__)
    return compute_pairs(loops);
#else
    (void)loops;
    return 0;
#endif
}

}  // extern "C"

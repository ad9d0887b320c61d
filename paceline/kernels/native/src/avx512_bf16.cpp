// Kernels for x86-64 with AVX512-BF16.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#define PACELINE_ISA avx512_bf16
#define PACELINE_TABLE avx512_bf16_kernels
#define PACELINE_AVX512
#define PACELINE_BF16_PRODUCTS
#define PACELINE_INTEGER_PRODUCTS
#define PACELINE_COMPRESSES
#include "kernels.h"
#endif

// Kernels for x86-64 with AVX-512 (F, BW, DQ and VL) but without BF16, as Skylake-SP to Ice Lake are.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define PACELINE_ISA avx512
#define PACELINE_TABLE avx512_kernels
#define PACELINE_AVX512
#define PACELINE_INTEGER_PRODUCTS
#include "kernels.h"
#endif

// Kernels for x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

#pragma GCC target("avx2,fma,f16c")
#define PACELINE_ISA avx2
#define PACELINE_TABLE avx2_kernels
#define PACELINE_AVX2
#define PACELINE_INTEGER_PRODUCTS
#include "kernels.h"
#endif

// Kernels for x86-64 with AVX2: the portable kernels with wider registers and the same results.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>

#include "team.h"

#pragma GCC target("avx2")
#define PACELINE_ISA avx2
#define PACELINE_TABLE avx2_kernels
#include "kernels.h"
#endif

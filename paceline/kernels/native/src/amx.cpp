// Kernels for x86-64 with AMX. Matrix tiles compute all bf16 products, of one row and of many.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16,amx-int8")
#define PACELINE_ISA amx
#define PACELINE_TABLE amx_kernels
#define PACELINE_AVX512
#define PACELINE_BF16_PRODUCTS
#define PACELINE_AMX
#include "kernels.h"
#endif

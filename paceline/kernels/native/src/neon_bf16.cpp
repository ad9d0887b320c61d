// Kernels for aarch64 with products of bf16 (FEAT_BF16).
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
#include <arm_neon.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

#pragma GCC target("arch=armv8.2-a+bf16+dotprod")
#define PACELINE_ISA neon_bf16
#define PACELINE_TABLE neon_bf16_kernels
#define PACELINE_NEON
#define PACELINE_BF16_PRODUCTS
#include "kernels.h"
#endif

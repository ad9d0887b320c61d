// Kernels for any aarch64. All of them have fused products and conversions of fp16.
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
#include <arm_neon.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

#define PACELINE_ISA neon
#define PACELINE_TABLE neon_kernels
#define PACELINE_NEON
#include "kernels.h"
#endif

// Kernels for any CPU.
#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"

#define PACELINE_ISA portable
#define PACELINE_TABLE portable_kernels
#include "kernels.h"

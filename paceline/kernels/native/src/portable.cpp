// Kernels for any CPU.
#include <cstring>

#include "team.h"

#define PACELINE_ISA portable
#define PACELINE_TABLE portable_kernels
#include "kernels.h"

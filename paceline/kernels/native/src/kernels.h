// All kernels for one instruction set. Before it includes this file, a source file defines PACELINE_ISA (its name) and
// PACELINE_TABLE (its table), and tells the compiler which instructions it may use. So instruction sets share none of
// the definitions below.

namespace paceline {
namespace PACELINE_ISA {

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

#include "vectors.h"
#include "simd.h"
#include "multiply.h"
#include "tiles.h"
#include "rows.h"
#include "linear.h"
#include "adapters.h"
#include "layout.h"
#include "codes.h"
#include "unpack.h"
#include "quantized.h"
#include "bytes.h"
#ifdef PACELINE_INTEGER_PRODUCTS
#include "integers.h"
#endif
#ifdef PACELINE_COMPRESSES
#include "compressed.h"
#endif
#include "tasks.h"
#include "paged.h"
#include "coded.h"
#include "values.h"
#include "attention.h"
#include "attend.h"
#include "recurrent.h"
#include "delta.h"
#include "logits.h"
#include "forms.h"
#include "choose.h"
#include "heads.h"
#include "routing.h"
#include "experts.h"

template <class T>
struct Table {
    // In the order of `Kind`.
    static constexpr Kernel kernels[kKinds] = {
        linear<T>,   embed<T>,     rms_norm<T>,     rotation<T>,          rotate<T>,
        store_kv<T>, attention<T>, silu_and_mul<T>, gelu_tanh_and_mul<T>, add<T>, linear_silu_and_mul<T>,
        linear_gelu_tanh_and_mul<T>, scale<T>, causal_conv<T>, selective_scan<T>, logits<T>,
        choose<T>, linear_heads<T>, concat<T>, router_logits<T>, choose_experts<T>, experts<T>, add_gated<T>,
        sigmoid_and_mul<T>, gated_delta_rule<T>, layer_norm<T>, gelu<T>, gelu_and_mul<T>, adapt<T>,
    };
};

}  // namespace PACELINE_ISA

// In the order of `Type`.
const KernelTable PACELINE_TABLE = {PACELINE_ISA::Table<PACELINE_ISA::bf16>::kernels,
                                    PACELINE_ISA::Table<float>::kernels};

}  // namespace paceline

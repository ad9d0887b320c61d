// The functions that Python calls through ctypes.

#include <atomic>
#include <cstring>
#include <new>

#include "compress.h"
#include "team.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PACELINE_X86
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
#define PACELINE_ARM
#endif
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {
namespace {

constexpr size_t kHugePage = 2 << 20;

void do_nothing() {}

#ifdef PACELINE_X86
__attribute__((target("amx-tile"))) void release_tiles() { _tile_release(); }

bool has_amx() {
#ifdef __linux__
    unsigned a, b, c, d;
    constexpr unsigned all = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & all) != all) return false;
    // On Linux a process must ask for the tiles (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

bool has_avx2() {
    unsigned a, b, c = 0, d;
    const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

#ifdef PACELINE_ARM
bool has_neon_bf16() {
#ifdef __linux__
    // HWCAP2_BF16, which older headers lack, and HWCAP_ASIMDDP
    return getauxval(AT_HWCAP2) & 1u << 14 && getauxval(AT_HWCAP) & 1u << 20;
#else
    return false;
#endif
}
#endif

struct InstructionSet {
    const char* name;
    bool (*runs_here)();
    const KernelTable* kernels;
    void (*leave)();
};

// Best first.
const InstructionSet kInstructionSets[] = {
#ifdef PACELINE_X86
    {"amx", [] { return has_avx512_bf16() && has_amx(); }, &amx_kernels, release_tiles},
    {"avx512-bf16", has_avx512_bf16, &avx512_bf16_kernels, do_nothing},
    {"avx512", has_avx512, &avx512_kernels, do_nothing},
    {"avx2", has_avx2, &avx2_kernels, do_nothing},
#endif
#ifdef PACELINE_ARM
    {"neon-bf16", has_neon_bf16, &neon_bf16_kernels, do_nothing},
    {"neon", [] { return true; }, &neon_kernels, do_nothing},
#endif
    {"portable", [] { return true; }, &portable_kernels, do_nothing},
};

const InstructionSet* find(const char* name) {
    for (const auto& set : kInstructionSets)
        if (!std::strcmp(set.name, name)) return set.runs_here() ? &set : nullptr;
    return nullptr;
}

template <class T>
void pack(Type type, const void* weight, int64_t out, int64_t in, void* packed) {
    const T* from = static_cast<const T*>(weight);
    T* to = static_cast<T*>(packed);
    constexpr int64_t pair = sizeof(T) == sizeof(uint16_t) ? 2 : 1;  // values along `in` that stay together
    const int64_t depth = padded_in(type, in);
    std::memset(to, 0, packed_elements(type, out, in) * sizeof(T));
    // In the order of `to`, because a write to a distant place costs more than a read.
    for (int64_t first = 0; first < out; first += kLanes) {
        const int64_t lanes = out - first < kLanes ? out - first : kLanes;
        T* group = to + first * depth;
        for (int64_t i = 0; i < in / pair * pair; i += pair)
            for (int64_t lane = 0; lane < lanes; ++lane)
                std::memcpy(group + i * kLanes + lane * pair, from + (first + lane) * in + i, pair * sizeof(T));
        if (in % pair)
            for (int64_t lane = 0; lane < lanes; ++lane)
                group[(in - 1) * kLanes + lane * pair] = from[(first + lane) * in + in - 1];
    }
}

}  // namespace
}  // namespace paceline

// Nothing else is exported, because another build of this library in the same process must not mix with this one.
#pragma GCC visibility push(default)
extern "C" {

// Writes the names of the instruction sets that run here, best first, separated by spaces. Returns their length.
int paceline_instruction_sets(char* names, int size) {
    int used = 0;
    for (const auto& set : paceline::kInstructionSets) {
        const int length = static_cast<int>(std::strlen(set.name));
        if (!set.runs_here() || used + length + 2 > size) continue;
        if (used) names[used++] = ' ';
        std::memcpy(names + used, set.name, length + 1);
        used += length;
    }
    return used;
}

// Tells the sizes of Op and Step and the number of kinds of operations with which this library was compiled.
void paceline_layout(int64_t* op_bytes, int64_t* step_bytes, int64_t* kinds) {
    *op_bytes = sizeof(paceline::Op);
    *step_bytes = sizeof(paceline::Step);
    *kinds = paceline::kKinds;
}

// Returns the bytes of a packed matrix.
int64_t paceline_packed_bytes(int32_t type, int64_t out, int64_t in) {
    return paceline::packed_elements(type, out, in) * (type == paceline::kBf16 ? 2 : 4);
}

// Asks for large pages for memory that will be written. Weights are read from end to end, and large pages avoid a TLB
// miss every 4 KiB.
void paceline_use_large_pages(void* to, int64_t bytes) {
#ifdef __linux__
    using paceline::kHugePage;
    const auto address = reinterpret_cast<uintptr_t>(to);
    const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Packs weight [out, in], contiguous; see program.h.
void paceline_pack(int32_t type, const void* weight, int64_t out, int64_t in, void* to) {
    using namespace paceline;
    if (type == kBf16) {
        pack<uint16_t>(kBf16, weight, out, in, to);
    } else {
        pack<float>(kFp32, weight, out, in, to);
    }
}

// Returns the size of the memory for a coding.
int64_t paceline_coding_bytes() { return sizeof(paceline::Coding); }

// Chooses the coding of weight [out, in], bf16 and contiguous. Returns the bytes of the matrix after compression; 0 if
// it does not pay.
int64_t paceline_choose_coding(const void* weight, int64_t out, int64_t in, void* to) {
    using namespace paceline;
    const Coding coding(static_cast<const uint16_t*>(weight), out * in);
    std::memcpy(to, &coding, sizeof(coding));
    return coding.pays ? CompressedLayout(out, in).bytes(coding.exceptions) : 0;
}

// Compresses the weight of which the coding was chosen; see program.h.
void paceline_compress(const void* coding, const void* weight, int64_t out, int64_t in, void* to) {
    paceline::compress(*static_cast<const paceline::Coding*>(coding), static_cast<const uint16_t*>(weight), out, in, to);
}

// Returns whether these bytes may be used as a compressed matrix [out, in].
int paceline_is_compressed(const void* data, int64_t bytes, int64_t out, int64_t in) {
    return paceline::is_compressed(data, bytes, out, in);
}

// Starts a team of `threads`, or fewer if the system gives no more, which runs programs with one instruction set.
// Returns null if the instruction set does not run here, or if there is no memory.
void* paceline_team_start(int threads, const char* instruction_set) {
    const auto* set = paceline::find(instruction_set);
    try {
        return set ? new paceline::Team(threads, *set->kernels, set->leave) : nullptr;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void paceline_team_stop(void* team) { delete static_cast<paceline::Team*>(team); }

// Lets the team take turns with teams of other workers. `page` must outlive it; a prefill worker's `slot` is negative.
void paceline_team_take_turns(void* team, void* page, int slot) {
    static_cast<paceline::Team*>(team)->take_turns({static_cast<paceline::TurnPage*>(page), slot});
}

// Runs a program. Returns 0, or an Error of program.h.
int paceline_run(void* team, const paceline::Op* ops, int64_t count, const paceline::Step* step) {
    return static_cast<paceline::Team*>(team)->run(ops, count, *step);
}

// Orders memory: what this thread has read and written before the call comes before what it reads and writes after it,
// for all other threads and processes.
void paceline_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Copies blocks: target[target_slots[i]] = source[source_slots[i]]. Writes bypass the caches, because the computation
// that runs meanwhile needs them. Addresses and sizes of blocks are multiples of 64 bytes.
void paceline_copy_blocks(char* target, const char* source, int64_t block_bytes, int64_t count,
                          const int64_t* target_slots, const int64_t* source_slots) {
    for (int64_t i = 0; i < count; ++i) {
        char* to = target + target_slots[i] * block_bytes;
        const char* from = source + source_slots[i] * block_bytes;
#ifdef PACELINE_X86
        for (int64_t at = 0; at < block_bytes; at += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                             _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
    }
    _mm_sfence();
#else
        std::memcpy(to, from, block_bytes);
    }
#endif
}

}  // extern "C"
#pragma GCC visibility pop

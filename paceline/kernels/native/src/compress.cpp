// Packs bf16 weights in 12 bits; see kFormatCompressed of program.h.

#include "compress.h"

#include <cstring>

// Kernels that read compressed weights need AVX-512, so packing may use AVX2.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

namespace paceline {
namespace {

constexpr int kCodes = 16, kNoCode = 16;
constexpr int64_t kMostExceptions = 1024;  // at most one exception in this many weights, because exceptions are slow

inline uint8_t exponent_of(uint16_t weight) { return static_cast<uint8_t>(weight >> 7); }

// Encodes a tile of weights whose rows are `in` apart. Returns whether all exponents have a code. Weights beyond `depth`
// may get any finite value, because the input of a product is 0 there. Results of lanes beyond `lanes` are dropped. These
// are plain loops, because the compiler makes vectors of them.
bool encode(const Coding& coding, const uint16_t* from, int64_t in, int64_t lanes, int64_t depth, uint8_t* parts,
            int64_t stride) {
    alignas(64) uint16_t packed[kTileWeights];
    alignas(64) uint8_t codes[kTileWeights], rest[kTileWeights];
    if (lanes == kLanes && depth == kDepth) {
        for (int64_t pair = 0; pair < kDepth / 2; ++pair)
            for (int64_t lane = 0; lane < kLanes; ++lane)
                std::memcpy(packed + pair * kDepth + lane * 2, from + lane * in + pair * 2, sizeof(uint32_t));
    } else {
        std::memset(packed, 0, sizeof(packed));
        for (int64_t lane = 0; lane < lanes; ++lane)
            for (int64_t i = 0; i < depth; ++i) packed[i / 2 * kDepth + lane * 2 + i % 2] = from[lane * in + i];
    }
    uint8_t missing = 0;
    for (int64_t first = 0; first < kTileWeights; first += 64) {
        uint8_t exponents[64], found[64];
        for (int i = 0; i < 64; ++i) {
            const uint16_t weight = packed[first + i];
            exponents[i] = exponent_of(weight);
            rest[first + i] = static_cast<uint8_t>((weight >> 8 & 0x80) | (weight & 0x7f));
            found[i] = kNoCode;
        }
        for (int code = kCodes - 1; code >= 0; --code)
            for (int i = 0; i < 64; ++i)
                found[i] = exponents[i] == coding.exponents[code] ? static_cast<uint8_t>(code) : found[i];
        for (int i = 0; i < 64; ++i) {
            missing |= found[i] & kNoCode;
            codes[first + i] = found[i] & (kNoCode - 1);
        }
    }
    for (int64_t part = 0; part < kTileParts; ++part, parts += stride)
        for (int64_t eight = 0; eight < 8; ++eight) {
            const int64_t place = (part * 4 + eight % 2) * kDepth + eight / 2 * 8, below = place + 2 * kDepth;
            uint64_t upper, lower;
            std::memcpy(&upper, codes + place, 8);
            std::memcpy(&lower, codes + below, 8);
            upper |= lower << 4;
            std::memcpy(parts + eight * 8, &upper, 8);
            std::memcpy(parts + 64 + eight * 8, rest + place, 8);
            std::memcpy(parts + 128 + eight * 8, rest + below, 8);
        }
    return !missing;
}

}  // namespace

Coding::Coding(const uint16_t* weight, int64_t count) : exceptions(count) {
    // Four separate counts, because an increment would wait for the previous one of the same exponent.
    int64_t parts[4][256] = {}, counts[256];
    for (int64_t i = 0; i < count; ++i) ++parts[i % 4][weight[i] >> 7 & 0xff];
    for (int i = 0; i < 256; ++i) counts[i] = parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i];
    std::memset(codes, kNoCode, sizeof(codes));
    for (uint8_t code = 0; code < kCodes; ++code) {
        int best = 0;
        for (int exponent = 1; exponent < 256; ++exponent)
            if (counts[exponent] > counts[best]) best = exponent;
        exponents[code] = static_cast<uint8_t>(best);
        if (counts[best]) codes[best] = code;
        exceptions -= counts[best];
        counts[best] = 0;
    }
    pays = exceptions <= count / kMostExceptions;
}

void compress(const Coding& coding, const uint16_t* weight, int64_t out, int64_t in, void* to) {
    const CompressedLayout layout(out, in);
    uint8_t* bytes = static_cast<uint8_t*>(to);
    ExponentTable* table = reinterpret_cast<ExponentTable*>(bytes + layout.table);
    uint32_t* start = reinterpret_cast<uint32_t*>(bytes + layout.starts);
    Exception* const exceptions = reinterpret_cast<Exception*>(bytes + layout.exceptions);
    Exception* exception = exceptions;
    for (int code = 0; code < kCodes; ++code) {
        table->high[code] = static_cast<uint8_t>(coding.exponents[code] >> 1);
        table->low[code] = static_cast<uint8_t>(coding.exponents[code] << 7);
    }
    uint32_t tile = 0;
    const auto pack_tile = [&](uint8_t* parts, int64_t stride, int64_t first_out, int64_t first_in) {
        const int64_t lanes = out - first_out < kLanes ? out - first_out : kLanes;
        const int64_t depth = in - first_in < kDepth ? in - first_in : kDepth;
        const uint16_t* from = weight + first_out * in + first_in;
        if (!encode(coding, from, in, lanes, depth, parts, stride)) {
            for (int64_t lane = 0; lane < lanes; ++lane)
                for (int64_t i = 0; i < depth; ++i) {
                    const uint16_t value = from[lane * in + i];
                    if (coding.codes[exponent_of(value)] != kNoCode) continue;
                    *exception++ = {tile, static_cast<uint16_t>(i / 2 * kDepth + lane * 2 + i % 2), value};
                }
        }
        ++tile;
    };
    for (int64_t first = 0; first < out; first += 2 * kLanes) {
        *start++ = static_cast<uint32_t>(exception - exceptions);
        const int64_t groups = first + kLanes < out ? 2 : 1;
        for (int64_t i = 0; i < in; i += kDepth, bytes += kTileParts * groups * kPartBytes)
            for (int64_t group = 0; group < groups; ++group)
                pack_tile(bytes + group * kPartBytes, groups * kPartBytes, first + group * kLanes, i);
    }
    *exception = {UINT32_MAX, 0, 0};
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

bool is_compressed(const void* data, int64_t bytes, int64_t out, int64_t in) {
    const CompressedLayout layout(out, in);
    const int64_t size = sizeof(Exception), count = (bytes - layout.exceptions) / size - 1;
    if (bytes < layout.bytes(0) || bytes != layout.bytes(count)) return false;
    const char* at = static_cast<const char*>(data);
    const auto exception = [&](int64_t i) {
        Exception found;
        std::memcpy(&found, at + layout.exceptions + i * size, size);
        return found;
    };
    const int64_t depth = round_up(in, kDepth) / kDepth, tiles = round_up(out, kLanes) / kLanes * depth;
    for (int64_t i = 0; i < count; ++i) {
        const Exception found = exception(i);
        if (found.tile >= tiles || found.place >= kTileWeights || found.tile > exception(i + 1).tile) return false;
    }
    if (exception(count).tile != UINT32_MAX) return false;
    int64_t before = 0;
    for (int64_t tile = 0, block = 0; tile < tiles; tile += 2 * depth, ++block) {
        while (exception(before).tile < tile) ++before;
        uint32_t start;
        std::memcpy(&start, at + layout.starts + block * int64_t{sizeof(start)}, sizeof(start));
        if (start != before) return false;
    }
    return true;
}

}  // namespace paceline

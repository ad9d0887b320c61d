// Packs bf16 weights in 12 bits; see kFormatCompressed of program.h.

#include "compress.h"

#include <cstring>

namespace paceline {
namespace {

constexpr int kCodes = 16, kNoCode = 16;
constexpr int64_t kMostExceptions = 1024;  // one in so many weights: more of them would take too much time

}  // namespace

Coding::Coding(const uint16_t* weight, int64_t count) : exceptions(count) {
    int64_t counts[256] = {};
    for (int64_t i = 0; i < count; ++i) ++counts[weight[i] >> 7 & 0xff];
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
    std::memset(bytes, 0, layout.table);
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
        for (int64_t place = 0; place < kTileWeights; ++place) {
            const int64_t row = place / kDepth, lane = place % kDepth;  // of packed weights
            const int64_t output = first_out + lane / 2, i = first_in + 2 * row + lane % 2;
            if (output >= out || i >= in) continue;
            const uint16_t value = weight[output * in + i];
            uint8_t code = coding.codes[value >> 7 & 0xff];
            if (code == kNoCode) {
                *exception++ = {tile, static_cast<uint16_t>(place), value};
                code = 0;
            }
            uint8_t* part = parts + row / 4 * stride;
            const int64_t half = row / 2 % 2, byte = lane / 8 * 16 + row % 2 * 8 + lane % 8;
            part[byte] |= static_cast<uint8_t>(code << 4 * half);
            part[64 + 64 * half + byte] = static_cast<uint8_t>((value >> 8 & 0x80) | (value & 0x7f));
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

}  // namespace paceline

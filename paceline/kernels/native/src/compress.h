// bf16 weights in 12 bits: which exponents have a code, and the packing.
#pragma once

#include "program.h"

namespace paceline {

struct Coding {
    Coding(const uint16_t* weight, int64_t count);

    uint8_t exponents[16];  // that have a code, the most frequent first
    uint8_t codes[256];     // of exponents; sixteen for those that have none
    int64_t exceptions;     // weights whose exponent has none
    bool pays;              // there are few of these
};

// Packs weight [out, in] to CompressedLayout(out, in).bytes(coding.exceptions).
void compress(const Coding& coding, const uint16_t* weight, int64_t out, int64_t in, void* to);

// Whether these bytes are a compressed matrix [out, in], as far as memory is concerned: who multiplies with it reads and
// writes nothing outside of it, whatever its numbers.
bool is_compressed(const void* data, int64_t bytes, int64_t out, int64_t in);

}  // namespace paceline

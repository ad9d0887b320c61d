// bf16 weights in 12 bits: the choice of exponents that have a code, and the packing.
#pragma once

#include "program.h"

namespace paceline {

struct Coding {
    Coding(const uint16_t* weight, int64_t count);

    uint8_t exponents[16];  // exponents that have a code, most frequent first
    uint8_t codes[256];     // code of each exponent; sixteen for an exponent without one
    int64_t exceptions;     // weights whose exponent has no code
    bool pays;              // whether there are few exceptions
};

// Packs weight [out, in] to CompressedLayout(out, in).bytes(coding.exceptions).
void compress(const Coding& coding, const uint16_t* weight, int64_t out, int64_t in, void* to);

// Returns whether these bytes have the structure of a compressed matrix [out, in]. If so, a product with it accesses no
// memory outside of it, whatever its numbers are.
bool is_compressed(const void* data, int64_t bytes, int64_t out, int64_t in);

}  // namespace paceline

// Linear layers and the embedding for any form of weights: packed, quantized or compressed.

template <class T>
struct Form {
    using Matrix = T;
};

// Calls run(form) with the form of the operation's weights.
template <class T, class Run>
static inline void by_form(const Op& op, const Run& run) {
#ifdef PACELINE_COMPRESSES
    if constexpr (sizeof(T) == sizeof(bf16))
        if (op.format == kFormatCompressed) return run(Form<Compressed>{});
#endif
    if (op.format & kFormatByteInput) {
        if constexpr (kHasFusedBytes)
            if (fuses_bytes()) return run(Form<Bytewise<T, FusedBytes>>{});
        if constexpr (kHasPlainBytes) return run(Form<Bytewise<T, PlainBytes>>{});
    }
#ifdef PACELINE_INTEGER_PRODUCTS
    if constexpr (sizeof(T) == sizeof(bf16))
        if (op.format && !must_unpack(op.format)) return run(Form<QuantizedIntegers>{});
#endif
    if (op.format) return run(Form<Quantized<T>>{});
    run(Form<Packed<T>>{});
}

#define PACELINE_BY_FORM(NAME, LAYERS, ...)                                                     \
    template <class T>                                                                          \
    static void NAME(const Op& op, const Step& step, Team& team) {                              \
        by_form<T>(op, [&](auto form) {                                                         \
            LAYERS<T, typename decltype(form)::Matrix>(op, step, team, ##__VA_ARGS__);          \
        });                                                                                     \
    }
PACELINE_BY_FORM(linear, linear_layers)
PACELINE_BY_FORM(embed, embed_tokens)
PACELINE_BY_FORM(logits, logits_layer)
PACELINE_BY_FORM(linear_silu_and_mul, gated_layers, SiluAndMul<T>{})
PACELINE_BY_FORM(linear_gelu_tanh_and_mul, gated_layers, GeluTanhAndMul<T>{})
#undef PACELINE_BY_FORM

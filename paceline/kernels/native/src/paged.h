// The paged cache: writes to it, and the packing of its keys and values as weights of a matrix product.

constexpr int64_t kPiece = 128;  // keys that one softmax takes at once; see attention.h

// Cache lines to prefetch with each unit of work: a tile of keys and a pair of values (both for each 128 bytes of a
// key), a product, and a square of sixteen packed keys. Together they fetch a piece. Each is about what memory delivers
// in the time that the work takes.
constexpr int64_t kPrefetchAtTile = 24, kPrefetchAtPair = 4, kPrefetchAtProduct = 32, kPrefetchAtSquare = 20;
constexpr int64_t kPrefetchAtColumns = 48;  // with each kLanes columns of values that stay in their blocks

template <class T>
static void store_whole(const Op& op, const Step& step, Team& team) {
    const Group& group = step.groups[op.group];
    const Cache& cache = op.cache;
    const int64_t row = cache.kv_heads * cache.head_dim;
    for_each_row(team, step.tokens, row, [&](int64_t token) {
        const int64_t slot = group.write_slots[token], offset = group.write_offsets[token];
        if (slot < 0 || slot >= cache.slots || offset < 0 || offset >= group.block_tokens)
            return team.fail(kNoSuchSlot);
        for (int64_t head = 0; head < cache.kv_heads; ++head) {
            const int64_t to = slot * cache.slot_stride + head * cache.head_stride + offset * cache.token_stride;
            const int64_t from = token * row + head * cache.head_dim;
            memcpy(static_cast<T*>(cache.keys) + to, static_cast<const T*>(op.a) + from, cache.head_dim * sizeof(T));
            if (cache.values == cache.keys) continue;  // latent vectors are both
            memcpy(static_cast<T*>(cache.values) + to, static_cast<const T*>(op.b) + from, cache.head_dim * sizeof(T));
        }
    });
}

// Access to the keys and values of one KV head in the order of their positions.
template <class T>
struct Paged {
    const Op& op;
    const Step& step;
    Team& team;
    const Group& group = step.groups[op.group];
    const Cache& cache = op.cache;
    const int64_t dim = cache.head_dim;
    const int64_t depth = padded<T>(dim);                        // elements of a packed key
    const int64_t width = (dim + kLanes - 1) / kLanes * kLanes;  // elements of a row of packed values

    // Offsets of kDepth positions in a plane of keys or values; kNowhere outside [first, end), because a slot may hold
    // anything there.
    using Places = int64_t[kDepth];
    static constexpr int64_t kNowhere = -1;
    void locate(const Rows& rows, int64_t position, int64_t first, int64_t end, Places& places) const {
        for (int64_t i = 0; i < kDepth; ++i) places[i] = kNowhere;
        const int64_t from = most(0, first - position), to = least(kDepth, end - position);
        for (int64_t i = from, next; i < to; i = next) {
            const int64_t offset = (position + i) % group.block_tokens;
            next = least(to, i + group.block_tokens - offset);
            const int64_t place = place_of(rows, position + i);
            if (place == kNowhere) return team.fail(kNoSuchSlot);
            for (int64_t j = i; j < next; ++j) places[j] = place + (j - i) * cache.token_stride;
        }
    }

    int64_t place_of(const Rows& rows, int64_t position) const {
        const int64_t block = position / group.block_tokens, offset = position % group.block_tokens;
        const int64_t slot = block < group.table_width ? group.tables[rows.request * group.table_width + block] : -1;
        if (slot < 0 || slot >= cache.slots) return kNowhere;
        return slot * cache.slot_stride + rows.kv_head * cache.head_stride + offset * cache.token_stride;
    }

    static const T* at(const void* plane, int64_t place) {
        return place == kNowhere ? nullptr : static_cast<const T*>(plane) + place;
    }

    // Prefetches of keys and values that will be needed soon. The computation issues a few at a time, so that memory is
    // never idle. All at once they would fill the memory queue, and the core would wait.
    struct Prefetch {
        Rows rows;
        int64_t position, end;  // positions not yet prefetched
        const char *key = nullptr, *value = nullptr, *last = nullptr;

        // Prefetches this many cache lines, half of them of keys.
        void issue(const Paged& paged, int64_t lines) {
            for (; lines > 0; lines -= 2, key += 64, value += 64) {
                if (key >= last && !next_block(paged)) return;
                __builtin_prefetch(key, 0, 2);
                __builtin_prefetch(value, 0, 2);
            }
        }
        // The same for work that grows with the size of a key: `lines` for each 128 bytes of it.
        void issue_by_size(const Paged& paged, int64_t lines) {
            issue(paged, most(1, paged.dim * int64_t(sizeof(T)) / 128) * lines);
        }

      private:
        bool next_block(const Paged& paged) {
            if (position >= end) return false;
            const int64_t place = paged.place_of(rows, position);
            const int64_t count = least(end - position, paged.group.block_tokens - position % paged.group.block_tokens);
            position += count;
            if (place == kNowhere) return false;
            key = reinterpret_cast<const char*>(at(paged.cache.keys, place));
            value = reinterpret_cast<const char*>(at(paged.cache.values, place));
            last = key + count * paged.cache.token_stride * sizeof(T);
            return true;
        }
    };

    // Packs kDepth keys in two groups of sixteen: [2][depth / pair][16][pair].
    void pack_keys(const Places& places, T* to, Prefetch& prefetch) const {
        for (int64_t lane = 0; lane < kDepth; lane += kLanes, to += depth * kLanes)
            pack_rows([&](int64_t i) { return at(cache.keys, places[lane + i]); }, to,
                      [&] { prefetch.issue(*this, kPrefetchAtSquare); });
    }

    static constexpr int64_t kPerLine = 64 / sizeof(T);  // elements of a row of a square

    // Packs sixteen rows as [depth / pair][16][pair]. find(i): the `dim` elements of row i; null for zeros.
    // Calls begin_square() before each square of 16 x 16 words.
    template <class Find, class Begin>
    void pack_rows(const Find& find, T* to, const Begin& begin_square) const {
        const T* rows[kLanes];
        bool whole = dim % kPerLine == 0;
        for (int64_t i = 0; i < kLanes; ++i) {
            rows[i] = find(i);
            whole = whole && rows[i];
        }
        for (int64_t d = 0; d < depth; d += kPerLine) {
            begin_square();
            if (whole) pack_square<true>(rows, d, to);
            else pack_square<false>(rows, d, to);
        }
    }

    // Transposes parts of the square that fit in registers. Whole: all elements exist.
    template <bool Whole>
    void pack_square(const T* const (&rows)[kLanes], int64_t d, T* to) const {
        constexpr int64_t pair = 4 / sizeof(T), size = kRegisterLanes;
        const int64_t words = Whole ? kLanes : least(kLanes, (depth - d) / pair);
        for (int64_t word = 0; word < words; word += size)
            for (int64_t first = 0; first < kLanes; first += size) {
                const int64_t from = d + word * pair;
                Words square[size];
#pragma GCC unroll 16
                for (int64_t i = 0; i < size; ++i) {
                    const T* row = rows[first + i];
                    if (Whole) square[i] = read<Words>(row + from);
                    else square[i] = row ? read_some<Words>(row + from, dim - from) : Words{};
                }
                transpose(square);
#pragma GCC unroll 16
                for (int64_t i = 0; i < size; ++i)
                    if (Whole || word + i < words) write(to + (from + i * pair) * kLanes + first * pair, square[i]);
            }
    }

    // Reads the first `count` elements of a vector, or all if there are more. The others are 0.
    template <class V>
    static V read_some(const T* from, int64_t count) {
        constexpr int64_t all = sizeof(V) / sizeof(T);
        if (count >= all) return read<V>(from);
        T some[all] = {};
        if (count > 0) memcpy(some, from, count * sizeof(T));
        return read<V>(some);
    }

    // Packs kDepth values as weights of `width` outputs: [width / 16][kPiece / pair][16][pair].
    void pack_values(const Places& places, T* to, Prefetch& prefetch) const {
        constexpr int64_t pair = 2;
        for (int64_t i = 0; i < kDepth; i += pair) {
            prefetch.issue_by_size(*this, kPrefetchAtPair);
            const T *a = at(cache.values, places[i]), *b = at(cache.values, places[i + pair - 1]);
            for (int64_t d = 0; d < width; d += 2 * kLanes)
                pack_lanes(a ? a + d : nullptr, b ? b + d : nullptr, dim - d, to + d * kPiece + i * kLanes);
        }
    }
    // Packs up to 2 * kLanes columns of one pair. Columns after the first kLanes are kPiece * kLanes further on.
    static void pack_lanes(const bf16* a, const bf16* b, int64_t count, bf16* to) {
        const u16x32 low = a ? read_some<u16x32>(a, count) : u16x32{};
        const u16x32 high = b ? read_some<u16x32>(b, count) : u16x32{};
        u16x32 first, second;
        interleave(low, high, first, second);
        write(to, first);
        if (count > kLanes) write(to + kPiece * kLanes, second);
    }
};

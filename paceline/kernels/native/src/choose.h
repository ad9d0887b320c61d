// The choice of tokens from logits. Random draws are in fp64, because fp32 would cut off the tail.

// `paceline.engine.sampler.uniform`, for a token.
static inline double uniform(const Draw& draw) {
    uint64_t state = draw.seed + 0x9E3779B97F4A7C15 * (draw.position + 1);
    for (int i = 0; i < 2; ++i) {
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9;
        state = (state ^ state >> 27) * 0x94D049BB133111EB;
        state ^= state >> 31;
    }
    return static_cast<double>(state >> 11) / (int64_t{1} << 53);
}

// e^x for x of at most 0, within 2 ulp; 0 below -708.
PACELINE_INLINE f64x8 exp(f64x8 x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the low bits
    const f64x8 shifted = x * 1.4426950408889634 + magic, power = shifted - magic;
    const f64x8 rest = (x - power * 0.693147180369123816490) - power * 1.90821492927058770002e-10;
    f64x8 sum = splat<f64x8>(1.0);  // Taylor series, which is exact enough for |rest| <= ln(2) / 2
#pragma GCC unroll 13
    for (int i = 13; i > 0; --i) sum = fma(rest * (1.0 / i), sum, splat<f64x8>(1.0));
    const f64x8 scaled = bits<f64x8>(bits<u64x8>(sum) + (bits<u64x8>(shifted) << 52));
    return select(x < -708.0, f64x8{}, scaled);
}

struct Candidate {
    float logit;
    int32_t token;
    double weight;
};

// Returns whether `a` comes before `b`: the more likely one first, and the lower token if equally likely.
static inline bool is_ahead(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Moves the first candidates of [0, n), in the order of `is_ahead`, to the front: as few as reach the goal with the sum
// of their weights, or with Counts by their number. The last of them in this order is put last. Returns how many they
// are, or n if all candidates do not reach the goal.
template <bool Counts>
static int64_t select(Candidate* all, int64_t n, double goal) {
    const auto measure = [](const Candidate& one) { return Counts ? 1.0 : one.weight; };
    const auto swap = [all](int64_t i, int64_t k) {
        const Candidate one = all[i];
        all[i] = all[k];
        all[k] = one;
    };
    int64_t begin = 0, end = n;
    double before = 0;
    uint64_t random = 0;  // chooses the pivot, so that no order of logits is slow
    while (end - begin > 1) {
        const int64_t last = end - 1;
        random = random * 6364136223846793005 + 1442695040888963407;
        swap(begin + (random >> 32) % (end - begin), last);
        int64_t place = begin;
        double ahead = 0;
        for (int64_t i = begin; i < last; ++i) {
            if (!is_ahead(all[i], all[last])) continue;
            ahead += measure(all[i]);
            swap(i, place++);
        }
        swap(place, last);
        if (place > begin && before + ahead >= goal) {
            end = place;
        } else {
            before += ahead + measure(all[place]);
            if (before >= goal) return place + 1;
            begin = place + 1;
        }
    }
    return begin < end ? begin + 1 : end;
}

// A draw of a token from one row of logits. The largest logit has the weight 1.
class Drawing {
  public:
    Drawing(const float* logits, int64_t size, float largest, const Draw& draw)
        : logits_(logits), size_(size), draw_(draw), scale_(1.0 / draw.temperature), largest_(largest * scale_) {}

    int64_t token(Worker& worker) const {
        if (draw_.top_k > 0 && draw_.top_k < size_) return draw_of_best(worker);
        return draw_.top_p < 1 ? draw_ranked(worker) : draw_in_order(worker);
    }

  private:
    static constexpr int64_t kBlock = 1024, kWide = 8;
    // Bins of tokens by likelihood. The last bin has all tokens whose likelihood is below e^-40 of the best.
    static constexpr int64_t kBins = 641;
    static constexpr double kBinsOfOne = 16.0;  // bins in which the likelihood falls by a factor of e

    // Logarithms of the weights of eight tokens from `first` on: 0 for the largest logit; -inf after the last token.
    f64x8 powers_at(int64_t first) const {
        float own[kWide];
        const int64_t count = least(kWide, size_ - first);
        for (int64_t i = count; i < kWide; ++i) own[i] = -__builtin_inff();
        memcpy(own, logits_ + first, count * sizeof(float));
        return convert<f64x8>(read<f32x8>(own)) * scale_ - largest_;
    }

    static bool any(i64x8 hits) { return max_lane(bits<i32x16>(-hits)) > 0; }

    f64x8 weigh(f64x8 powers) const {
        const f64x8 weights = exp(powers);
        return select(weights < draw_.min_p, f64x8{}, weights);
    }

    static i64x8 bins_of(f64x8 powers) {
        const f64x8 bins = powers * -kBinsOfOne, most = splat<f64x8>(kBins - 1);
        return convert<i64x8>(select(bins < most, bins, most));
    }

    // Draws with the cumulative sum in order of tokens.
    int64_t draw_in_order(Worker& worker) const {
        const int64_t blocks = (size_ + kBlock - 1) / kBlock;
        double* sums = static_cast<double*>(worker.scratch.take(blocks * sizeof(double)));
        double total = 0;
        for (int64_t block = 0; block < blocks; ++block) {
            f64x8 lanes = {};
            for (int64_t i = block * kBlock; i < least(size_, (block + 1) * kBlock); i += kWide)
                lanes += weigh(powers_at(i));
            sums[block] = 0;
            for (int64_t lane = 0; lane < kWide; ++lane) sums[block] += lanes[lane];
            total += sums[block];
        }
        const double target = uniform(draw_) * total;
        int64_t chosen = 0;  // the block that reaches the target, or the last with any weight
        double before = 0, next = 0;
        for (int64_t block = 0; block < blocks && next <= target; ++block) {
            if (sums[block] == 0) continue;
            chosen = block, before = next;
            next += sums[block];
        }
        int64_t token = 0;
        for (int64_t i = chosen * kBlock; i < least(size_, (chosen + 1) * kBlock); i += kWide) {
            const f64x8 weights = weigh(powers_at(i));
            for (int64_t lane = 0; lane < kWide; ++lane) {
                if (weights[lane] == 0) continue;
                token = i + lane;
                before += weights[lane];
                if (before > target) return token;
            }
        }
        return token;
    }

    // Draws with the cumulative sum from the most likely token on: by bins, and by tokens in the bins that matter.
    int64_t draw_ranked(Worker& worker) const {
        double* bins = static_cast<double*>(worker.scratch.take(kBins * sizeof(double) + size_ * sizeof(Candidate)));
        Candidate* all = reinterpret_cast<Candidate*>(bins + kBins);
        for (int64_t bin = 0; bin < kBins; ++bin) bins[bin] = 0;
        for (int64_t i = 0; i < size_; i += kWide) {
            const f64x8 powers = powers_at(i), weights = weigh(powers);
            const i64x8 own = bins_of(powers);
            for (int64_t lane = 0; lane < kWide; ++lane) bins[own[lane]] += weights[lane];
        }
        double mass = 0;
        for (int64_t bin = 0; bin < kBins; ++bin) mass += bins[bin];
        const Bin last = bin_at(bins, draw_.top_p * mass);  // the bin in which top_p cuts
        int64_t count = gather(last.index, all);
        count = select<false>(all, count, draw_.top_p * mass - last.before);
        const double goal = beyond(uniform(draw_) * (last.before + weight_of(all, count)));
        const Bin own = bin_at(bins, goal);
        if (own.index < last.index) count = gather(own.index, all);
        return all[select<false>(all, count, goal - own.before) - 1].token;
    }

    struct Bin {
        int64_t index;
        double before;  // sum of weights in the bins before it
    };

    // Returns the first bin with which the weight reaches the goal, or the last bin that has any weight.
    static Bin bin_at(const double* bins, double goal) {
        Bin found{0, 0};
        double before = 0;
        for (int64_t bin = 0; bin < kBins && (bin == 0 || before < goal); ++bin) {
            if (bins[bin] > 0) found = {bin, before};
            before += bins[bin];
        }
        return found;
    }

    // Gathers the tokens of a bin that have any weight. Returns how many.
    int64_t gather(int64_t bin, Candidate* all) const {
        int64_t count = 0;
        for (int64_t i = 0; i < size_; i += kWide) {
            const f64x8 powers = powers_at(i);
            const i64x8 hits = bins_of(powers) == bin;
            if (any(hits)) count = add(i, powers, hits, all, count);
        }
        return count;
    }

    // Draws from the top_k best tokens, with the cumulative sum from the most likely one on.
    int64_t draw_of_best(Worker& worker) const {
        Candidate* all = static_cast<Candidate*>(worker.scratch.take(size_ * sizeof(Candidate)));
        const double bound = bound_of_best(all);
        int64_t count = 0;
        for (int64_t i = 0; i < size_; i += kWide) {
            const f64x8 powers = powers_at(i);
            const i64x8 hits = powers >= bound;
            if (any(hits)) count = add(i, powers, hits, all, count);
        }
        count = select<true>(all, count, static_cast<double>(draw_.top_k));
        if (draw_.top_p < 1) count = select<false>(all, count, draw_.top_p * weight_of(all, count));
        const double goal = beyond(uniform(draw_) * weight_of(all, count));
        return all[select<false>(all, count, goal) - 1].token;
    }

    // Returns a lower bound of the top_k best tokens' powers: top_k groups of tokens have a token that is not below it.
    double bound_of_best(Candidate* groups) const {
        constexpr int64_t kGroup = 4 * kLanes;
        const int64_t count = size_ / kGroup;
        if (count < draw_.top_k) return -__builtin_inf();
        for (int64_t group = 0; group < count; ++group) {
            const float* own = logits_ + group * kGroup;
            f32x16 largest = load(own);
            for (int64_t i = kLanes; i < kGroup; i += kLanes) largest = max(largest, load(own + i));
            groups[group] = {max_lane(largest), static_cast<int32_t>(group), 0};
        }
        const int64_t last = select<true>(groups, count, static_cast<double>(draw_.top_k)) - 1;
        return groups[last].logit * scale_ - largest_;
    }

    // Adds the tokens among eight from `first` on that are hits and have any weight. Returns the new count.
    int64_t add(int64_t first, f64x8 powers, i64x8 hits, Candidate* all, int64_t count) const {
        const f64x8 weights = weigh(powers);
        for (int64_t lane = 0; lane < kWide; ++lane)
            if (hits[lane] && weights[lane] > 0)
                all[count++] = {logits_[first + lane], static_cast<int32_t>(first + lane), weights[lane]};
        return count;
    }

    static double weight_of(const Candidate* all, int64_t count) {
        double sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += all[i].weight;
        return sum;
    }

    // Returns the next larger number, because the first token whose cumulative weight exceeds the target is drawn.
    static double beyond(double target) { return __builtin_nextafter(target, __builtin_inf()); }

    const float* logits_;
    const int64_t size_;
    const Draw& draw_;
    const double scale_, largest_;
};

static int64_t choose_one(const float* logits, int64_t size, const Draw& draw, Worker& worker) {
    uint64_t rank = 0;
    raise_rank(&rank, logits, 0, size);
    const float largest = logits[place_of(rank)];
    // Nothing can be drawn if the largest logit is NaN or infinite.
    if (draw.temperature == 0 || !(largest - largest == 0)) return place_of(rank);
    return Drawing(logits, size, largest, draw).token(worker);
}

template <class T>
static void choose(const Op& op, const Step& step, Team& team) {
    const float* logits = static_cast<const float*>(op.a);
    const Draw* draws = static_cast<const Draw*>(op.b);
    int64_t* tokens = static_cast<int64_t*>(op.out);
    team.for_each(op.rows * step.tokens, [&](int64_t i, Worker& worker) {
        tokens[i] = choose_one(logits + draws[i].row * op.n1, op.n0, draws[i], worker);
    });
}

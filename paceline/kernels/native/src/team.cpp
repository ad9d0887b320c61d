#include "team.h"

#include <chrono>

namespace paceline {
namespace {

// Longer than the pause between two operations that Python starts, shorter than what would hurt whoever shares the core.
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr int kSpinsBetweenClocks = 64;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

void* Scratch::take(size_t bytes) {
    if (bytes > size_) {
        memory_.reset();
        memory_.reset(new char[bytes + 64]);
        size_ = bytes;
    }
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) & ~uintptr_t{63});
}

int64_t Worker::next() { return team_.next_.fetch_add(1, std::memory_order_relaxed); }

int Worker::threads() const { return team_.threads_; }

void Worker::fail(int code) {
    int none = 0;
    team_.error_.compare_exchange_strong(none, code);
}

void* Worker::shared(size_t bytes) {
    if (index_ == 0) team_.shared_memory_ = team_.shared_.take(bytes);
    barrier();
    return team_.shared_memory_;
}

void Worker::barrier() {
    const uint32_t phase = team_.phase_.load();
    if (team_.arrived_.fetch_add(1) + 1 < team_.threads_) return team_.await_change(team_.phase_, phase);
    team_.arrived_.store(0);
    team_.next_.store(0);
    team_.advance(team_.phase_);
}

Team::Team(int threads, const KernelTable& kernels, void (*leave)())
    : threads_(threads), kernels_(kernels), leave_(leave) {
    workers_.reserve(threads);
    for (int index = 0; index < threads; ++index) workers_.emplace_back(*this, index);
    for (int index = 1; index < threads; ++index) helpers_.emplace_back([this, index] { work(index); });
}

Team::~Team() {
    stopping_.store(true);
    advance(program_);
    for (auto& helper : helpers_) helper.join();
}

int Team::run(const Op* ops, int64_t count, const Step& step) {
    const std::lock_guard<std::mutex> lock(one_at_a_time_);
    ops_ = ops, count_ = count, step_ = &step;
    error_.store(0);
    if (threads_ > 1) advance(program_);
    go_through(workers_[0]);
    return error_.load();
}

void Team::work(int index) {
    for (uint32_t seen = 0;; ++seen) {
        await_change(program_, seen);
        if (stopping_.load()) return;
        go_through(workers_[index]);
    }
}

void Team::go_through(Worker& worker) {
    // Behind the last barrier the next program may come in while this thread is still leaving.
    const auto ops = ops_;
    const auto count = count_;
    const auto step = step_;
    for (int64_t i = 0; i < count; ++i) kernels_[ops[i].type][ops[i].kind](ops[i], *step, worker);
    leave_();
    worker.tile_rows = 0;
}

void Team::await_change(const std::atomic<uint32_t>& word, uint32_t seen) {
    for (const auto end = std::chrono::steady_clock::now() + kSpin; std::chrono::steady_clock::now() < end;) {
        for (int spin = 0; spin < kSpinsBetweenClocks; ++spin) {
            if (word.load() != seen) return;
            relax();
        }
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return word.load() != seen; });
    sleepers_.fetch_sub(1);
}

void Team::advance(std::atomic<uint32_t>& word) {
    word.fetch_add(1);
    if (sleepers_.load() > 0) {
        // Who is about to sleep holds the lock from its last look at the word until it sleeps.
        { const std::lock_guard<std::mutex> lock(sleep_); }
        wake_.notify_all();
    }
}

}  // namespace paceline

// Prefill and decode workers of a host take turns on its cores; see ../../../core/turns.py, which speaks the same.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace paceline {

constexpr int kTurnSlots = 62;

// In memory that the processes share; instants of the monotonic clock, in nanoseconds. What stands behind it is Python's.
struct TurnPage {
    std::atomic<int64_t> prefill_until, wanted_until, busy_until[kTurnSlots];
};

class Turns {
  public:
    // slot: that of a decode worker, or negative for a prefill worker.
    Turns(TurnPage* page, int slot) : page_(page), slot_(slot) {}

    // Behind the last operation: what lies between two programs is Python's, and leaves cores idle.
    void after_program() const {
        if (page_ && slot_ >= 0) page_->busy_until[slot_].store(0, std::memory_order_relaxed);
    }

    // Before each operation: decode says that it computes, prefill waits until it may.
    void before_operation() const {
        if (!page_) return;
        if (slot_ >= 0) {
            page_->busy_until[slot_].store(now() + kAlive, std::memory_order_relaxed);
            return;
        }
        while (!prefill_may_compute()) std::this_thread::sleep_for(kPoll);
    }

  private:
    static constexpr int64_t kAlive = 50'000'000;
    static constexpr auto kPoll = std::chrono::microseconds(100);

    static int64_t now() {
        const auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    }

    bool prefill_may_compute() const {
        const int64_t at = now();
        page_->wanted_until.store(at + kAlive, std::memory_order_relaxed);
        if (at < page_->prefill_until.load(std::memory_order_relaxed)) return true;
        for (const auto& busy : page_->busy_until)
            if (at < busy.load(std::memory_order_relaxed)) return false;
        return true;
    }

    TurnPage* page_;
    int slot_;
};

}  // namespace paceline

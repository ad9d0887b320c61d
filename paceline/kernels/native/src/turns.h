// Turns of prefill and decode workers on the cores of a host. ../../../core/turns.py uses the same page.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace paceline {

constexpr int kTurnSlots = 62;

// Times of the monotonic clock, in nanoseconds, in memory that the processes share. Only Python uses the later words.
struct TurnPage {
    std::atomic<int64_t> prefill_until, wanted_until, busy_until[kTurnSlots];
};

class Turns {
  public:
    // slot: the slot of a decode worker; negative for a prefill worker.
    Turns(TurnPage* page, int slot) : page_(page), slot_(slot) {}

    // Called after the last operation. Between two programs Python runs and cores are idle, so prefill may compute.
    void after_program() const {
        if (page_ && slot_ >= 0) page_->busy_until[slot_].store(0, std::memory_order_relaxed);
    }

    // Called before each operation: decode tells that it computes; prefill waits until it may compute.
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

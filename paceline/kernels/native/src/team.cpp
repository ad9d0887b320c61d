#include "team.h"

#if defined(__linux__)
#include <pthread.h>
#endif

#include <chrono>
#include <exception>
#include <new>

namespace paceline {
namespace {

// Longer than the time between two operations with tasks; short enough not to hurt other work on this core.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsBetweenClocks = 64;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // about as long as a pause of x86, whereas `yield` takes no time on most cores
#endif
}

// Spins until `ready`. Returns false after kSpin.
template <class Ready>
bool spin_until(const Ready& ready) {
    for (const auto end = std::chrono::steady_clock::now() + kSpin; std::chrono::steady_clock::now() < end;) {
        for (int spin = 0; spin < kSpinsBetweenClocks; ++spin) {
            if (ready()) return true;
            relax();
        }
    }
    return false;
}

}  // namespace

void* Scratch::take(size_t bytes) {
    if (bytes > size_) {
        memory_.reset();
        size_ = 0;
        memory_.reset(new char[bytes + 64]);
        size_ = bytes;
    }
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) & ~uintptr_t{63});
}

Team::Team(int threads, const KernelTable& kernels, void (*leave)())
    : kernels_(kernels), leave_(leave), range_count_(threads > 1 ? threads : 1), ranges_(new Range[range_count_]) {
    try {
        for (int index = 1; index < threads; ++index) {
            Helper& helper = helpers_.emplace_back();
            helper.worker.index_ = index;
            helper.thread = std::thread([this, &helper] { help(helper.worker); });
        }
    } catch (const std::exception&) {
        // std::system_error or std::bad_alloc: there are no more threads. Fewer threads compute the same results.
        if (!helpers_.empty() && !helpers_.back().thread.joinable()) helpers_.pop_back();
    }
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(sleep_);
        stopping_.store(true);
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.thread.join();
}

template <class Work>
void Team::or_fail(const Work& work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        fail(kNoMemory);
    }
}

int Team::run(const Op* ops, int64_t count, const Step& step) {
    const std::lock_guard<std::mutex> lock(one_at_a_time_);
    error_.store(0);
    for (int64_t i = 0; i < count && !error_.load(); i += 1 + ops[i].joined) {
        turns_.before_operation();
        or_fail([&] { kernels_[ops[i].type][ops[i].kind](ops[i], step, *this); });
    }
    turns_.after_program();
    await_late_helpers();  // because they read the caller's memory
    leave_();
    caller_.tile_rows = 0;
    return error_.load();
}

void Team::fail(int code) {
    int none = 0;
    error_.compare_exchange_strong(none, code);
}

void Team::do_tasks(int64_t count, Body body, const void* context) {
    if (count <= 1 || helpers_.empty()) {
        for (int64_t i = 0; i < count; ++i) {
            body(context, i, caller_);
            caller_.settle();
        }
        return;
    }
    const uint64_t job = ++job_ & 0xffffffff;
    Job& own = jobs_[job % kJobs];
    own.body = body;
    own.context = context;
    done_.store(0);
    for (int i = 0; i < range_count_; ++i) {
        const uint64_t first = count * i / range_count_, end = count * (i + 1) / range_count_;
        ranges_[i].ends[job % kJobs].store(static_cast<uint32_t>(end), std::memory_order_relaxed);
        ranges_[i].ticket.store(job << 32 | first, std::memory_order_release);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_.load() > 0) {
        // A thread that is about to sleep holds the lock from its last look at the ticket until it sleeps.
        { const std::lock_guard<std::mutex> lock(sleep_); }
        wake_.notify_all();
    }
    while (do_one(caller_)) {
    }
    const auto all_done = [&] { return done_.load() == count; };
    while (!spin_until(all_done))
        if (!take_over_one(own)) std::this_thread::yield();
}

bool Team::take_over_one(const Job& job) {
    for (auto& helper : helpers_) {
        const int64_t task = helper.worker.take_over();
        if (task < 0) continue;
        do_task(job, task, caller_);
        return true;
    }
    return false;
}

void Team::await_late_helpers() const {
    for (const auto& helper : helpers_)
        while (helper.worker.is_late()) std::this_thread::yield();
}

void* Team::shared(size_t bytes) {
    if (bytes > shared_.size()) await_late_helpers();  // they may still read the memory that is freed now
    return shared_.take(bytes);
}

bool Team::has_tasks(const Range& range) {
    const uint64_t ticket = range.ticket.load();
    return static_cast<uint32_t>(ticket) < range.ends[(ticket >> 32) % kJobs].load();
}

bool Team::do_one(Worker& worker) {
    for (int i = 0; i < range_count_; ++i) {
        Range& range = ranges_[(worker.index_ + i) % range_count_];
        uint64_t ticket = range.ticket.load();
        const uint32_t job = (ticket >> 32) % kJobs, task = static_cast<uint32_t>(ticket);
        if (task >= range.ends[job].load()) continue;
        if (range.ticket.compare_exchange_strong(ticket, ticket + 1)) do_task(jobs_[job], task, worker);
        return true;
    }
    return false;
}

void Team::do_task(const Job& job, int64_t task, Worker& worker) {
    // No exception may pass here, because other threads still compute with data on the caller's stack.
    or_fail([&] { job.body(job.context, task, worker); });
    if (worker.settle()) done_.fetch_add(1);
}

void Team::help(Worker& worker) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "kernels");  // for tools that show CPU time by thread
#endif
    // A helper looks at its own range only: without tasks in it, the job has fewer tasks than threads.
    const auto has_own = [&] { return has_tasks(ranges_[worker.index_]); };
    while (!stopping_.load()) {
        while (do_one(worker)) {
        }
        if (spin_until(has_own)) continue;
        leave_();
        worker.tile_rows = 0;
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return stopping_.load() || has_own(); });
        sleepers_.fetch_sub(1);
    }
}

}  // namespace paceline

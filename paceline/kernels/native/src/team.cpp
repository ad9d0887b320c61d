#include "team.h"

#if defined(__linux__)
#include <pthread.h>
#endif

#include <chrono>
#include <exception>
#include <new>

namespace paceline {
namespace {

// Longer than what lies between two operations that share their work, shorter than what would hurt others on this core.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsBetweenClocks = 64;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Spins until `ready`; false when it has taken too long.
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

Team::Team(int threads, const KernelTable& kernels, void (*leave)()) : kernels_(kernels), leave_(leave) {
    try {
        for (int index = 1; index < threads; ++index) {
            Helper& helper = helpers_.emplace_back();
            helper.thread = std::thread([this, &helper] { help(helper.worker); });
        }
    } catch (const std::exception&) {
        // std::system_error or std::bad_alloc: no thread more can be had. Fewer compute the same.
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
    for (int64_t i = 0; i < count && !error_.load(); ++i) {
        turns_.before_operation();
        or_fail([&] { kernels_[ops[i].type][ops[i].kind](ops[i], step, *this); });
    }
    turns_.after_program();
    await_late_helpers();  // what they read is the caller's
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
    const uint64_t job = (ticket_.load() >> 32) + 1;
    Job& own = jobs_[job % kJobs];
    own.body = body;
    own.context = context;
    own.tasks.store(static_cast<uint32_t>(count));
    done_.store(0);
    ticket_.store(job << 32);
    if (sleepers_.load() > 0) {
        // Who is about to sleep holds the lock from its last look at the ticket until it sleeps.
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
    if (bytes > shared_.size()) await_late_helpers();  // they may read what is freed now
    return shared_.take(bytes);
}

bool Team::has_tasks() const {
    const uint64_t ticket = ticket_.load();
    return static_cast<uint32_t>(ticket) < jobs_[(ticket >> 32) % kJobs].tasks.load();
}

bool Team::do_one(Worker& worker) {
    uint64_t ticket = ticket_.load();
    const Job& job = jobs_[(ticket >> 32) % kJobs];
    const uint32_t task = static_cast<uint32_t>(ticket);
    if (task >= job.tasks.load()) return false;
    if (!ticket_.compare_exchange_strong(ticket, ticket + 1)) return true;
    do_task(job, task, worker);
    return true;
}

void Team::do_task(const Job& job, int64_t task, Worker& worker) {
    // Nothing may be thrown past here: others still compute, with what lies on the caller's stack.
    or_fail([&] { job.body(job.context, task, worker); });
    if (worker.settle()) done_.fetch_add(1);
}

void Team::help(Worker& worker) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "kernels");  // for tools that count CPU time by thread
#endif
    while (!stopping_.load()) {
        while (do_one(worker)) {
        }
        if (spin_until([&] { return has_tasks(); })) continue;
        leave_();
        worker.tile_rows = 0;
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return stopping_.load() || has_tasks(); });
        sleepers_.fetch_sub(1);
    }
}

}  // namespace paceline

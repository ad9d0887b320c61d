// A persistent team of threads that computes a program's operations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "program.h"
#include "turns.h"

namespace paceline {

// Memory that grows and is never copied: what it held is gone when it grows. Aligned to 64 bytes.
class Scratch {
  public:
    void* take(size_t bytes);

  private:
    std::unique_ptr<char[]> memory_;
    size_t size_ = 0;
};

// What belongs to one thread.
struct Worker {
    Scratch scratch;
    int tile_rows = 0;  // what its matrix tiles are configured for
};

// One thread, the caller of `run`, goes through the program; the others help with the tasks of the operation under way.
// Nobody waits for a helper that has not come: on a machine with other work it may be a long time without a core.
class Team {
  public:
    // kernels: what the programs are made of; leave: what a thread does before it rests.
    Team(int threads, const KernelTable& kernels, void (*leave)());
    ~Team();
    Team(const Team&) = delete;

    // From now on operations wait for their turn. Not while a program runs.
    void take_turns(const Turns& turns) { turns_ = turns; }

    // Runs a program; returns 0 or the first error.
    int run(const Op* ops, int64_t count, const Step& step);

    // Calls body(i, worker) once for every i in [0, count), each on the thread that comes first; returns when all are
    // done. Only kernels call it.
    template <class Body>
    void for_each(int64_t count, const Body& body) {
        do_tasks(count, [](const void* body_, int64_t i, Worker& worker) {
            (*static_cast<const Body*>(body_))(i, worker);
        }, &body);
    }

    int threads() const { return static_cast<int>(helpers_.size()) + 1; }
    // Memory that all threads see, until the next call.
    void* shared(size_t bytes) { return shared_.take(bytes); }
    // Reports an error of the program; the first one stays.
    void fail(int code);

  private:
    using Body = void (*)(const void*, int64_t, Worker&);
    struct Job {
        std::atomic<uint32_t> tasks{0};
        Body body = nullptr;
        const void* context = nullptr;
    };
    // Two: the job under way, and the next one that is being written beside it. A helper that looked at an older ticket
    // may read the wrong one of them; then the ticket has changed, and it gets no task.
    static constexpr uint32_t kJobs = 2;

    // Calls work(); reports memory that it does not get.
    template <class Work>
    void or_fail(const Work& work);
    void do_tasks(int64_t count, Body body, const void* context);
    bool do_one(Worker& worker);
    bool has_tasks() const;
    void help();

    const KernelTable& kernels_;
    void (*const leave_)();
    std::mutex one_at_a_time_;
    Turns turns_{nullptr, 0};
    std::atomic<int> error_{0};
    Scratch shared_;
    Worker caller_;

    // The number of the job under way in the upper half, its next task in the lower one. Who counts it up owns the
    // task, and as long as he has not counted `done_` up the job stays.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) Job jobs_[kJobs];

    std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> helpers_;
};

}  // namespace paceline

// A persistent team of threads that computes a program's operations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>

#include "program.h"
#include "turns.h"

namespace paceline {

// Memory that grows and is never copied: what it held is gone when it grows. Aligned to 64 bytes.
class Scratch {
  public:
    void* take(size_t bytes);
    size_t size() const { return size_; }

  private:
    std::unique_ptr<char[]> memory_;
    size_t size_ = 0;
};

// What belongs to one thread.
class Worker {
  public:
    Scratch scratch;
    int tile_rows = 0;  // what its matrix tiles are configured for; less than 0 for columns

    // Of a restartable task, before it writes: false where another thread took the task over, and this one is too late.
    bool may_write() {
        int64_t task = offered_.load();
        return task == kNothing || (task != kTaken && offered_.compare_exchange_strong(task, kNothing));
    }

  private:
    friend class Team;
    static constexpr int64_t kNothing = -1, kTaken = -2;

    int index_ = 0;  // of its range of tasks

    void offer(int64_t task) { offered_.store(task); }
    // For another thread: the task on offer, which is that thread's from now on; negative where there is none.
    int64_t take_over() {
        int64_t task = offered_.load();
        return task >= 0 && offered_.compare_exchange_strong(task, kTaken) ? task : kNothing;
    }
    bool is_late() const { return offered_.load() == kTaken; }
    // At the end of a task: whether it counts.
    bool settle() { return offered_.exchange(kNothing) != kTaken; }

    // A restartable task that this thread computes, until it begins to write.
    alignas(64) std::atomic<int64_t> offered_{kNothing};
};

// One thread, the caller of `run`, goes through the program; the others help with the tasks of the operation under way.
// On a machine with other work, a helper may be without a core for a long time. Nobody waits for one that has not come,
// nor for one that lost its core amid a restartable task: the caller computes the task once more, and what the helper
// has of it in the end does not count.
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

    // Calls body(i, worker) once for every i in [0, count); returns when all are done. Each thread goes through a range
    // of its own, in order, so that what it reads lies in a row; then it takes tasks of ranges that others have yet to
    // go through. Only kernels call it.
    template <class Body>
    void for_each(int64_t count, const Body& body) {
        do_tasks(count, [](const void* body_, int64_t i, Worker& worker) {
            (*static_cast<const Body*>(body_))(i, worker);
        }, &body);
    }

    // The same for restartable tasks, with body(find(i), worker), which writes nothing unless `worker.may_write()`.
    // A thread whose task was taken over may go on with it during later operations. So `body` is copied, and must hold
    // values, no references to what ends with the operation; and what it reads of memory that later operations write
    // may be anything. What must not be read so late, `find` reads.
    template <class Find, class Body>
    void for_each_restartable(int64_t count, const Find& find, const Body& body) {
        static_assert(std::is_trivially_copyable_v<Body>, "a lambda that captures plain values");
        struct Task {
            const Find& find;
            const Body& body;
        } const task{find, body};
        do_tasks(count, [](const void* task_, int64_t i, Worker& worker) {
            const Task& task = *static_cast<const Task*>(task_);
            const auto found = task.find(i);
            const Body own = task.body;
            worker.offer(i);
            own(found, worker);
        }, &task);
    }

    int threads() const { return static_cast<int>(helpers_.size()) + 1; }
    // Memory that all threads see, until the next call.
    void* shared(size_t bytes);
    // Reports an error of the program; the first one stays.
    void fail(int code);

  private:
    using Body = void (*)(const void*, int64_t, Worker&);
    struct Job {
        Body body = nullptr;
        const void* context = nullptr;
    };
    // Two: the job under way, and the next one that is being written beside it. A helper that looked at an older ticket
    // may read the wrong one of them; then the ticket has changed, and it gets no task.
    static constexpr uint32_t kJobs = 2;

    // The tasks that one thread goes through. In the upper half of the ticket is the number of the job under way, in
    // the lower one the next task. Who counts it up owns the task, and as long as he has not counted `done_` up the job
    // stays.
    struct alignas(64) Range {
        std::atomic<uint64_t> ticket{0};
        std::atomic<uint32_t> ends[kJobs] = {};
    };

    // Calls work(); reports memory that it does not get.
    template <class Work>
    void or_fail(const Work& work);
    void do_tasks(int64_t count, Body body, const void* context);
    bool do_one(Worker& worker);
    void do_task(const Job& job, int64_t task, Worker& worker);
    // Computes a task that a helper is at; false where there is none on offer.
    bool take_over_one(const Job& job);
    // Returns when no helper is at a task that was taken over.
    void await_late_helpers() const;
    static bool has_tasks(const Range& range);
    void help(Worker& worker);

    const KernelTable& kernels_;
    void (*const leave_)();
    std::mutex one_at_a_time_;
    Turns turns_{nullptr, 0};
    std::atomic<int> error_{0};
    Scratch shared_;
    Worker caller_;

    const int range_count_;
    const std::unique_ptr<Range[]> ranges_;
    uint64_t job_ = 0;
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) Job jobs_[kJobs];

    std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
    struct Helper {
        Worker worker;
        std::thread thread;
    };
    std::deque<Helper> helpers_;
};

}  // namespace paceline

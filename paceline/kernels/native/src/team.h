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

// Memory that grows as needed, aligned to 64 bytes. Its content is lost when it grows.
class Scratch {
  public:
    void* take(size_t bytes);
    size_t size() const { return size_; }

  private:
    std::unique_ptr<char[]> memory_;
    size_t size_ = 0;
};

// The data of one thread.
class Worker {
  public:
    Scratch scratch;
    int tile_rows = 0;  // rows for which its matrix tiles are configured; negative for columns

    // Called by a restartable task before it writes. Returns false if another thread has taken the task over.
    bool may_write() {
        int64_t task = offered_.load();
        return task == kNothing || (task != kTaken && offered_.compare_exchange_strong(task, kNothing));
    }

  private:
    friend class Team;
    static constexpr int64_t kNothing = -1, kTaken = -2;

    int index_ = 0;  // number of its own range of tasks

    void offer(int64_t task) { offered_.store(task); }
    // Called by another thread: takes over the task on offer and returns it; negative if there is none.
    int64_t take_over() {
        int64_t task = offered_.load();
        return task >= 0 && offered_.compare_exchange_strong(task, kTaken) ? task : kNothing;
    }
    bool is_late() const { return offered_.load() == kTaken; }
    // Called at the end of a task. Returns whether this thread's result counts.
    bool settle() { return offered_.exchange(kNothing) != kTaken; }

    // The restartable task that this thread computes, until it begins to write.
    alignas(64) std::atomic<int64_t> offered_{kNothing};
};

// The caller of `run` goes through the program. The other threads, its helpers, take tasks of the current operation.
// On a busy machine a helper may have no core for a long time. Nobody waits for a helper that has not begun a task, nor
// for one that lost its core during a restartable task: the caller computes this task again, and the helper's result is
// dropped.
class Team {
  public:
    // kernels: compute the operations of programs; leave: called by a thread before it rests.
    Team(int threads, const KernelTable& kernels, void (*leave)());
    ~Team();
    Team(const Team&) = delete;

    // Lets later operations wait for their turn. Must not be called while a program runs.
    void take_turns(const Turns& turns) { turns_ = turns; }

    // Runs a program. Returns 0 or the first error.
    int run(const Op* ops, int64_t count, const Step& step);

    // Calls body(i, worker) once for every i in [0, count), and returns when all calls have ended. Each thread goes
    // through a range of its own, in order, so that it reads consecutive memory. Then it takes tasks that are left in
    // the ranges of other threads. Only kernels call this.
    template <class Body>
    void for_each(int64_t count, const Body& body) {
        do_tasks(count, [](const void* body_, int64_t i, Worker& worker) {
            (*static_cast<const Body*>(body_))(i, worker);
        }, &body);
    }

    // The same for restartable tasks, with body(find(i), worker). `body` must write only if `worker.may_write()`.
    // A thread whose task was taken over may still run `body` during later operations. So `body` is copied, and must
    // hold values, not references to data of this operation. It may read memory that later operations overwrite, and
    // must tolerate any content there. Data for which this is not possible must be read by `find`.
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
    // Returns memory for all threads, valid until the next call.
    void* shared(size_t bytes);
    // Reports an error of the program. Only the first one is kept.
    void fail(int code);

  private:
    using Body = void (*)(const void*, int64_t, Worker&);
    struct Job {
        Body body = nullptr;
        const void* context = nullptr;
    };
    // Two: the current job and the next one, which may be written at the same time. A helper with an old ticket may
    // read the wrong one. But then the ticket has changed, and the helper gets no task.
    static constexpr uint32_t kJobs = 2;

    // The tasks of one thread. The upper half of the ticket is the number of the current job, the lower half the next
    // task. A thread that increments the ticket owns the task. The job stays until the thread has incremented `done_`.
    struct alignas(64) Range {
        std::atomic<uint64_t> ticket{0};
        std::atomic<uint32_t> ends[kJobs] = {};
    };

    // Calls work(), and reports kNoMemory if it gets no memory.
    template <class Work>
    void or_fail(const Work& work);
    void do_tasks(int64_t count, Body body, const void* context);
    bool do_one(Worker& worker);
    void do_task(const Job& job, int64_t task, Worker& worker);
    // Takes over a helper's task and computes it. Returns false if none is on offer.
    bool take_over_one(const Job& job);
    // Waits until no helper computes a task that was taken over.
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

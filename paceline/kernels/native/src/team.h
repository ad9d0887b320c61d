// A persistent team of threads that goes through a program together.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "program.h"

namespace paceline {

// Memory that grows and is never copied: what it held is gone when it grows. Aligned to 64 bytes.
class Scratch {
  public:
    void* take(size_t bytes);

  private:
    std::unique_ptr<char[]> memory_;
    size_t size_ = 0;
};

class Team;

// One thread's part in a program. Every thread calls the same kernels in the same order.
class Worker {
  public:
    Worker(Team& team, int index) : team_(team), index_(index) {}

    // Calls body(i) once for every i in [0, count), each on the thread that comes first, and waits until all are done.
    template <class Body>
    void for_each(int64_t count, const Body& body) {
        for (int64_t i = next(); i < count; i = next()) body(i);
        barrier();
    }
    void barrier();
    int threads() const;
    // The same memory for all threads; only between two barriers, where one asks for it.
    void* shared(size_t bytes);
    // Reports an error of the program; the first one stays.
    void fail(int code);

    Scratch scratch;
    int tile_rows = 0;  // what the matrix tiles of this thread are configured for

  private:
    int64_t next();

    Team& team_;
    int index_;
};

class Team {
  public:
    // kernels: what the programs are made of; leave: what each thread does at the end of one.
    Team(int threads, const KernelTable& kernels, void (*leave)());
    ~Team();
    Team(const Team&) = delete;

    // Runs a program; returns 0 or the first error.
    int run(const Op* ops, int64_t count, const Step& step);

  private:
    friend class Worker;

    void work(int index);
    void go_through(Worker& worker);
    void await_change(const std::atomic<uint32_t>& word, uint32_t seen);
    void advance(std::atomic<uint32_t>& word);

    const int threads_;
    const KernelTable& kernels_;
    void (*const leave_)();
    std::vector<Worker> workers_;
    std::vector<std::thread> helpers_;
    std::mutex one_at_a_time_;

    // The program under way.
    const Op* ops_ = nullptr;
    int64_t count_ = 0;
    const Step* step_ = nullptr;
    Scratch shared_;
    void* shared_memory_ = nullptr;
    std::atomic<int> error_{0};

    alignas(64) std::atomic<uint32_t> program_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
};

}  // namespace paceline

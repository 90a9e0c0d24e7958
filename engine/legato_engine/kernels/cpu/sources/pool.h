// Threads that run one function together, with barriers and a shared counter of tasks.
#pragma once

#include <cstdlib>
#include <mutex>
#include <vector>

#include "turn.h"

namespace legato {

// Memory that grows and then loses its contents. What threads share grows before they run.
class Scratch {
   public:
    ~Scratch() { std::free(memory_); }
    template <typename T>
    T* room(size_t count) {
        size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (bytes > bytes_) {
            std::free(memory_);
            memory_ = std::aligned_alloc(64, bytes);
            bytes_ = memory_ == nullptr ? 0 : bytes;
            if (memory_ == nullptr) std::abort();
        }
        return static_cast<T*>(memory_);
    }

   private:
    void* memory_ = nullptr;
    size_t bytes_ = 0;
};

// Inputs of products: floats, also rounded, integers, scales and totals of blocks.
struct InputRoom {
    Scratch floats, narrow, values, scales, totals;
};

class Pool;

// One thread's view of a run.
struct Thread {
    explicit Thread(Pool& of) : pool(of) {}
    Pool& pool;
    Scratch slab, sums, scores, keys, seen, units, hidden;
};

class Pool {
   public:
    explicit Pool(int size) : size_(size) {
        for (int index = 0; index < size; ++index) threads_.emplace_back(new Thread(*this));
        for (int index = 1; index < size; ++index)
            std::thread([this, index] { work(*threads_[index]); }).detach();
    }

    int size() const { return size_; }

    // Call `prepare`, then `job` on all threads, this one among them; one run at a time.
    template <typename Prepare, typename Job>
    void run(const Prepare& prepare, const Job& job) {
        std::lock_guard<std::mutex> alone(running_);
        prepare();
        job_ = &job;
        call_ = [](const void* of, Thread& thread) { (*static_cast<const Job*>(of))(thread); };
        next_.store(0, std::memory_order_relaxed);
        start_.advance();
        call_(job_, *threads_[0]);
        barrier();
    }

    // Every thread arrives before any goes on; the counter of tasks starts anew.
    void barrier() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        uint32_t turn = turn_.now();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            turn_.advance();
        } else {
            turn_.wait_past(turn);
        }
    }

    // Call `task(index)` for each of `count` tasks on some thread, then meet.
    template <typename Task>
    void share(long count, const Task& task) {
        for (long at; (at = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(at);
        barrier();
    }

    InputRoom normed, active;  // of the run, as the next three
    Scratch qkv, up, heads;

   private:
    void work(Thread& thread) {
        uint32_t turn = 0;
        for (;;) {
            start_.wait_past(turn);
            ++turn;
            call_(job_, thread);
            barrier();
        }
    }

    const int size_;
    std::vector<Thread*> threads_;
    std::mutex running_;
    const void* job_ = nullptr;
    void (*call_)(const void*, Thread&) = nullptr;
    Turn start_, turn_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<long> next_{0};
};

}  // namespace legato

// A number that threads wait for to change: a short while awake, then asleep.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

#include "vectors.h"

namespace legato {

class Turn {
   public:
    uint32_t now() const { return value_.load(std::memory_order_acquire); }

    void advance() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
    }

    void wait_past(uint32_t old) {
        for (int tries = 0; tries < SPINS; ++tries) {
            if (now() != old) return;
            relax();
        }
        for (int tries = 0; tries < YIELDS; ++tries) {
            if (now() != old) return;
            std::this_thread::yield();
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        sleep(old);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

   private:
#ifdef __linux__
    void sleep(uint32_t old) {
        while (now() == old)
            syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
    void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t old) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return now() != old; });
    }
    void wake() {
        { std::lock_guard<std::mutex> lock(mutex_); }  // none is between its look and its sleep
        changed_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable changed_;
#endif

    static constexpr int SPINS = 1000;  // some 20 us
    static constexpr int YIELDS = 20;
    std::atomic<uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
};

}  // namespace legato

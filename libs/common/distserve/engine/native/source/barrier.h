// Where the threads of one pass wait for each other. Phases of a decode step last tens of microseconds, less than it takes
// to put a thread to sleep and wake it; but where other processes share the cores, who spins keeps from its core the very
// thread it waits for. So: spin for a bounded time, then sleep (Ousterhout, "Scheduling Techniques for Concurrent
// Systems", 1982: two-phase waiting); for less time after it was in vain, for more after it was not.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace distserve {

constexpr int MOST_SPINS = 1000;  // looks at the word before sleeping: 20 to 50 us
constexpr int FEWEST_SPINS = 8;

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Barrier {
    std::atomic<int32_t> round{0};  // how often all have passed
    std::atomic<int32_t> arrived{0};
    std::atomic<int32_t> sleeping{0};

public:
    // Returns when all `team` threads have called it; what they wrote before is then seen by all. `spins` is the
    // thread's own: MOST_SPINS at first, and kept from call to call.
    void pass(int team, int& spins) {
        if (team == 1) return;
        const int32_t now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1);
            if (sleeping.load()) wake();
            return;
        }
        for (int i = 0; i < spins; i++) {
            if (round.load(std::memory_order_acquire) != now) {
                spins = spins * 2 < MOST_SPINS ? spins * 2 : MOST_SPINS;
                return;
            }
            relax();
        }
        spins = spins / 4 > FEWEST_SPINS ? spins / 4 : FEWEST_SPINS;
        sleeping.fetch_add(1);
        while (round.load() == now) sleep_while(now);
        sleeping.fetch_sub(1);
    }

private:
#if defined(__linux__)
    void sleep_while(int32_t now) { syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep_while(int32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
};

// One thread of a pass, as it sees itself.
struct Member {
    const int thread, team;  // its number, and how many there are
    Barrier& barrier;
    int spins = MOST_SPINS;

    void wait() { barrier.pass(team, spins); }
};

}  // namespace distserve

// Memory of one pass, laid out piece by piece in what the caller gives.
#pragma once

#include <cstdint>
#include <type_traits>

namespace distserve {

class Scratch {
    intptr_t at, begin;

public:
    // From `base` on, whatever it is; nullptr: only reckons.
    explicit Scratch(void* base) : at(((intptr_t)base + 63) / 64 * 64), begin((intptr_t)base) {}

    // Room for `count`, on a cache line of its own.
    template <class N>
    void take(N*& place, long count) {
        place = reinterpret_cast<N*>(at);
        at += (count * sizeof(N) + 63) / 64 * 64;
    }

    // Bytes taken; 63 more than from a base of nullptr if the base is on no line.
    long bytes() const { return at - begin; }
};

}  // namespace distserve

// What is computed row by row: norms, activation, rotary embedding, each product rounded where the model's code rounds it.
#pragma once

#include <cmath>

#include "vectors.h"

namespace distserve {

// Calls work(at, count) for each sixteen (the last time: fewer) of [0, size).
template <class F>
static inline void by_vectors(long size, F work) {
    long at = 0;
    for (; at + LANES <= size; at += LANES) work(at, LANES);
    if (at < size) work(at, (int)(size - at));
}

template <class T>
static inline f32x16 get(const T* from, int count) {
    return count == LANES ? widen(from) : widen_part(from, count);
}

template <class T>
static inline void put(T* to, f32x16 value, int count) {
    if (count == LANES) narrow(to, value);
    else narrow_part(to, value, count);
}

// weight * (x / rms(x)), each product rounded to T. In place is fine.
template <class T>
static void rms_norm(T* out, const T* x, const T* weight, long size, float eps) {
    f32x16 squares = {};
    by_vectors(size, [&](long at, int count) {
        const f32x16 value = get(x + at, count);
        squares += value * value;
    });
    const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    by_vectors(size, [&](long at, int count) {
        put(out + at, get(weight + at, count) * rounded<T>(get(x + at, count) * factor), count);
    });
}

// x / (1 + e^-x), rounded to T.
template <class T>
static inline f32x16 silu(f32x16 x) {
    return rounded<T>(x / (1.0f + exponential(-x)));
}

// Rotary embedding of one head, the halves as pairs (Su et al., "RoFormer", 2021, in the order of GPT-NeoX).
template <class T>
static void rotate(T* head, const T* cos, const T* sin, long half) {
    by_vectors(half, [&](long at, int count) {
        const f32x16 a = get(head + at, count), b = get(head + half + at, count);
        const f32x16 c = get(cos + at, count), s = get(sin + at, count);
        put(head + at, rounded<T>(a * c) + rounded<T>(-b * s), count);
        put(head + half + at, rounded<T>(b * c) + rounded<T>(a * s), count);
    });
}

}  // namespace distserve

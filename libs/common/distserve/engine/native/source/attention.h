// Attention of one token over a paged cache, with the softmax computed as tokens come by (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018): no scores are kept. Long contexts are cut in parts for several threads and
// the parts merged by their maxima (flash-decoding; Dao et al., 2023).
//
// Tokens come in steps of up to 64, wherever their blocks lie. While one is worked on, the next is fetched, in the order it
// lies in: heads read it in another one, which a processor doesn't foresee.
#pragma once

#include "linear.h"

namespace distserve {

constexpr float NOTHING = -1e30f;  // the maximum of no scores: finite, so that differences stay numbers
constexpr int STEP_TOKENS = 64;

// Where up to 64 tokens of one context are: `rows` are their keys, from STEP_TOKENS on their values, each of all KV heads.
// The last key's row stands again up to a multiple of 16.
template <class T>
struct Step {
    int count = 0;
    const T* rows[2 * STEP_TOKENS];
};

// Asks for a step's rows, bit by bit, in the order they lie in; for the second cache, which waits for more lines at a time
// than the first.
template <class T>
class Fetch {
    const Step<T>& step;
    const long width;
    long row = 0, at = 0;

public:
    Fetch(const Step<T>& of, long row_width) : step(of), width(row_width) {}

    // The next `count` numbers, which end a row or are inside of one.
    void ask(long count) {
        if (row == step.count && row < STEP_TOKENS) row = STEP_TOKENS;
        if (row == STEP_TOKENS + step.count) return;
        for (long i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(step.rows[row] + at + i, 0, 2);
        at += count;
        if (at == width) at = 0, row++;
    }
};

// What attention over some tokens gives, head by head: `sums` [head_dim] of exp(score - maximum) * value, and the sum of
// those weights. Begins as nothing; attend() adds to it.
struct Attended {
    float *sums, *maximum, *total;
};

// Lane j is x . rows[j], both from `at` on in their rows.
template <class T>
static inline f32x16 dot_each(const T* x, const T* const* rows, long at, long size) {
    typedef Dot<T> D;
    f32x16 sums[LANES] = {};
    const long whole = size - size % D::STEP;
    for (long k = 0; k < whole; k += D::STEP) {
        const typename D::Piece piece = D::load(x + k);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) sums[j] = D::add(sums[j], piece, D::load(rows[j] + at + k));
    }
    if (whole < size) {
        const typename D::Piece piece = D::load_part(x + whole, size - whole);
        for (int j = 0; j < LANES; j++) {
            sums[j] = D::add(sums[j], piece, D::load_part(rows[j] + at + whole, size - whole));
        }
    }
    return sum_each(sums);
}

// Numbers [d, d + 16 D) of what Q heads sum: shrunk, and the values of `count` tokens added by their weights. `fetch`, if
// not nullptr, is asked for as much a token as a KV head has of it.
template <class T, int Q, int D>
static inline void add_values(
    const T* const* values, int count, long at, const float (*weights)[STEP_TOKENS], const float* shrink, float* sums,
    long head_dim, Fetch<T>* fetch
) {
    f32x16 found[Q][D];
    for (int q = 0; q < Q; q++) {
        for (int i = 0; i < D; i++) found[q][i] = widen(sums + q * head_dim + i * LANES) * shrink[q];
    }
    for (int j = 0; j < count; j++) {
        if (fetch) fetch->ask(head_dim), fetch->ask(head_dim);
        f32x16 value[D];
#pragma GCC unroll 4
        for (int i = 0; i < D; i++) value[i] = widen(values[j] + at + i * LANES);
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
            const float weight = weights[q][j];
#pragma GCC unroll 4
            for (int i = 0; i < D; i++) found[q][i] += value[i] * weight;
        }
    }
    for (int q = 0; q < Q; q++) {
        for (int i = 0; i < D; i++) narrow(sums + q * head_dim + i * LANES, found[q][i]);
    }
}

// Q queries of one KV head, contiguous, over the tokens of a step; the head's numbers are at `at` of a token's.
template <class T, int Q>
static void attend(
    const T* query, const Step<T>& step, long at, long head_dim, float scale, Attended found, Fetch<T>* fetch
) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float weights[Q][STEP_TOKENS];
    float highest[Q], change[LANES] = {}, shrink[LANES];
    for (int q = 0; q < Q; q++) {
        f32x16 most = broadcast(found.maximum[q]);
        for (int j = 0; j < step.count; j += LANES) {
            const f32x16 dots = dot_each(query + q * head_dim, step.rows + j, at, head_dim);
            const f32x16 scores = lane < step.count - j ? dots * scale : broadcast(NOTHING);
            most = larger(most, scores);
            narrow(weights[q] + j, scores);
        }
        highest[q] = maximum(most);
        change[q] = found.maximum[q] - highest[q];
    }
    narrow(shrink, exponential(widen(change)));
    for (int q = 0; q < Q; q++) {
        f32x16 total = {};
        for (int j = 0; j < step.count; j += LANES) {
            const f32x16 weight = exponential(widen(weights[q] + j) - highest[q]);
            total += weight;
            narrow(weights[q] + j, weight);
        }
        found.maximum[q] = highest[q];
        found.total[q] = found.total[q] * shrink[q] + sum(total);
    }
    const auto add = [&](auto add_some, long d) {
        add_some(
            step.rows + STEP_TOKENS, step.count, at + d, weights, shrink, found.sums + d, head_dim, d ? nullptr : fetch
        );
    };
    long d = 0;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add(add_values<T, Q, 4>, d);
    for (; d < head_dim; d += LANES) add(add_values<T, Q, 1>, d);
}

}  // namespace distserve

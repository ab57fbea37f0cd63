// Attention of one token over a paged cache, with the softmax computed as blocks come by (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018): no scores are kept. Long contexts are cut in parts for several threads and
// the parts merged by their maxima (flash-decoding; Dao et al., 2023).
#pragma once

#include "linear.h"

namespace distserve {

constexpr float NOTHING = -1e30f;  // the maximum of no scores: finite, so that differences stay numbers

// What attention over some tokens gives, head by head: `sums` [head_dim] of exp(score - maximum) * value, and the sum of
// those weights. Begins as nothing; attend() adds to it.
struct Attended {
    float *sums, *maximum, *total;
};

// Q queries of one KV head, contiguous, over tokens [first, last) of one block, which is at keys and values.
template <class T, int Q>
static void attend(
    const T* query, const T* keys, const T* values, long token_stride, int first, int last, int head_dim, float scale,
    Attended found
) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int at = first / LANES * LANES; at < last; at += LANES) {  // tokens [at, at + 16), as far as asked for
        const int begin = first > at ? first - at : 0;
        const int end = last - at < LANES ? last - at : LANES;
        const i32x16 counts = (lane >= begin) & (lane < end);
        float weights[Q][LANES];
        float shrink[Q];
        for (int q = 0; q < Q; q++) {
            const f32x16 dots = dot_tile<T, 1, false>(
                query + q * head_dim, 0, keys + at * token_stride, token_stride, end - 1, head_dim
            );
            const f32x16 scores = counts ? dots * scale : broadcast(NOTHING);
            const float highest = maximum(scores);
            const float before = found.maximum[q], now = highest > before ? highest : before;
            const f32x16 weight = counts ? exponential(scores - now) : f32x16{};
            shrink[q] = now == before ? 1.0f : exponential(broadcast(before - now))[0];
            found.maximum[q] = now;
            found.total[q] = found.total[q] * shrink[q] + sum(weight);
            narrow(weights[q], weight);
        }
        for (int d = 0; d < head_dim; d += LANES) {
            f32x16 sums[Q];
            for (int q = 0; q < Q; q++) sums[q] = widen(found.sums + q * head_dim + d) * shrink[q];
            for (int i = begin; i < end; i++) {
                const f32x16 value = widen(values + (at + i) * token_stride + d);
                for (int q = 0; q < Q; q++) sums[q] += value * weights[q][i];
            }
            for (int q = 0; q < Q; q++) narrow(found.sums + q * head_dim + d, sums[q]);
        }
    }
}

}  // namespace distserve

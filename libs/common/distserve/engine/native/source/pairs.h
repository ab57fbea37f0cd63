// Rows of x with pairs of inputs side by side, sixteen rows a vector, and their products by rows of W just as they lie in
// the model: a pair of weights is spread over a vector and multiplied with the same pair of sixteen rows. What has to be
// rearranged is so the small side, x, and sums need no reduction. Needs an instruction for pairs (AVX512-BF16).
//
// Packed: [rows / 16][size / 2][16 rows] pairs, rows that are missing are zero; Intel's tiles read the same (tiles.h).
#pragma once

#include "vectors.h"

#if defined(__AVX512BF16__)
#define DISTSERVE_HAS_PAIRS 1
#else
#define DISTSERVE_HAS_PAIRS 0
#endif

namespace distserve {

constexpr int GROUP = 16;        // rows of x in a vector of pairs
constexpr int PACK_INPUTS = 32;  // sizes are multiples of it

// v[i][j] becomes v[j][i].
static inline void transpose(f32x16 v[16]) {
    const auto swap = [&](auto keep, auto move, int step) {
        for (int i = 0; i < 16; i++) {
            if (i & step) continue;
            const f32x16 a = v[i], b = v[i | step];
            v[i] = keep(a, b), v[i | step] = move(a, b);
        }
    };
    swap(
        pick<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>,
        pick<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>, 8
    );
    swap(
        pick<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>,
        pick<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>, 4
    );
    swap(
        pick<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>,
        pick<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>, 2
    );
    swap(
        pick<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>,
        pick<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>, 1
    );
}

// Sixteen rows of x, or the `rows` that there are: packed [size / 2][16] pairs. size: even.
[[maybe_unused]] static void pack_group(const bf16* x, long x_stride, int rows, long size, bf16* packed) {
    for (long k = 0; k < size; k += PACK_INPUTS) {
        const long bytes = (size - k < PACK_INPUTS ? size - k : PACK_INPUTS) * sizeof(bf16);
        f32x16 pairs[GROUP] = {};  // bits, never computed with
        for (int r = 0; r < GROUP && r < rows; r++) memcpy(&pairs[r], x + r * x_stride + k, bytes);
        transpose(pairs);
        memcpy(packed + k * GROUP, pairs, bytes * GROUP);
    }
}

#if DISTSERVE_HAS_PAIRS

// Rows of W, or columns of values: number n's pair k is at w[n * by_number + k * by_pair].
struct Pairs {
    const uint32_t* w;
    long by_number, by_pair;
};

// N numbers by GROUPS x 16 packed rows, summed over `count` pairs: y[n * y_stride + row], added to what is there if ADD.
// With AHEAD, what lies N numbers on is fetched to the second cache.
template <int N, int GROUPS, bool ADD, bool AHEAD>
__attribute__((noinline)) static void pair_block(
    const bf16* packed, long group_numbers, Pairs of, long count, float* y, long y_stride
) {
    f32x16 sums[N][GROUPS];
    for (int n = 0; n < N; n++) {
        for (int g = 0; g < GROUPS; g++) sums[n][g] = ADD ? widen(y + n * y_stride + g * GROUP) : f32x16{};
    }
    const uint32_t* rows[N];
    for (int n = 0; n < N; n++) rows[n] = of.w + n * of.by_number;
    for (long k = 0; k < count; k++) {
        if (AHEAD && k % (64 / sizeof(uint32_t)) == 0) {
            for (int n = 0; n < N; n++) __builtin_prefetch(rows[n] + N * of.by_number + k, 0, 2);
        }
        __m512bh piece[GROUPS];
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) piece[g] = load_vector<__m512bh>(packed + g * group_numbers + k * 2 * GROUP);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(rows[n][k * of.by_pair]);
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; g++) sums[n][g] = (f32x16)_mm512_dpbf16_ps((__m512)sums[n][g], piece[g], pair);
        }
    }
    for (int n = 0; n < N; n++) {
        for (int g = 0; g < GROUPS; g++) narrow(y + n * y_stride + g * GROUP, sums[n][g]);
    }
}

// Outputs [0, count) of w, count a multiple of 16, for `rows` packed rows: y [rows, y_stride].
[[maybe_unused]] static void pair_linear(
    const bf16* packed, int rows, const bf16* w, int count, long size, float* y, long y_stride
) {
    constexpr int N = 8;
    const long group_numbers = GROUP * size;
    for (int n = 0; n < count; n += GROUP) {
        for (int first = 0; first < rows; first += 2 * GROUP) {
            float turned[GROUP][2 * GROUP];  // [output][row]
            const bool two = rows - first > GROUP;
            for (int half = 0; half < GROUP; half += N) {
                const auto call = [&](auto block) {
                    const Pairs of = {(const uint32_t*)(w + (n + half) * size), size / 2, 1};
                    block(packed + first * size, group_numbers, of, size / 2, turned[half], 2 * GROUP);
                };
                if (first == 0) two ? call(pair_block<N, 2, false, true>) : call(pair_block<N, 1, false, true>);
                else two ? call(pair_block<N, 2, false, false>) : call(pair_block<N, 1, false, false>);
            }
            for (int group = 0; group < 1 + two; group++) {
                f32x16 tile[GROUP];
                for (int j = 0; j < GROUP; j++) tile[j] = widen(turned[j] + group * GROUP);
                transpose(tile);
                float* out = y + (first + group * GROUP) * y_stride + n;
                const int left = rows - first - group * GROUP;
                for (int r = 0; r < GROUP && r < left; r++) narrow(out + r * y_stride, tile[r]);
            }
        }
    }
}

#endif

}  // namespace distserve

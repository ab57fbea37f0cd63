// y = x W^T for few rows of x: each weight is fetched from memory once and used for all rows while it is in the cache.
//
// W is used as the model has it, [outputs, inputs] row by row, without a packed copy: an output is a dot product of two
// contiguous rows. Sixteen of them are summed side by side (M rows of x by N rows of W), which hides the latency of the
// additions, and are reduced together. What the next rows of W will be is known, so they are asked for ahead of time:
// without that a core waits for memory half of the time.
#pragma once

#include "tiles.h"
#include "vectors.h"

namespace distserve {

// Fewer rows of x are faster as dot products.
constexpr int FEWEST_ROWS_FOR_PAIRS = 9, FEWEST_ROWS_FOR_TILES = 5;

// Rows of W that all rows of x pass before the next are looked at: in bytes, about what the first cache holds.
constexpr long NEAR_BYTES = 32 * 1024;

// Lane i * N + j is x[i] . w[j], i < M, j < N, M * N = 16. Rows of w from `last` on are read as `last`. If `ahead` is
// not 0, what lies that many numbers further on than each piece of w is fetched to the second cache.
template <class T, int M, bool AHEAD>
static inline f32x16 dot_tile(
    const T* x, long x_stride, const T* w, long w_stride, int last, long size, long ahead = 0
) {
    typedef Dot<T> D;
    constexpr int N = LANES / M;
    const T* rows[N];
    for (int j = 0; j < N; j++) rows[j] = w + (j < last ? j : last) * w_stride;
    f32x16 sums[LANES] = {};
    const long whole = size - size % D::STEP;
    for (long k = 0; k < whole; k += D::STEP) {
        typename D::Piece piece[M];
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) piece[i] = D::load(x + i * x_stride + k);
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) {
            const typename D::Piece weight = D::load(rows[j] + k);
            if (AHEAD) __builtin_prefetch(rows[j] + k + ahead, 0, 2);
#pragma GCC unroll 16
            for (int i = 0; i < M; i++) sums[i * N + j] = D::add(sums[i * N + j], piece[i], weight);
        }
    }
    if (whole < size) {
        for (int j = 0; j < N; j++) {
            const typename D::Piece weight = D::load_part(rows[j] + whole, size - whole);
            for (int i = 0; i < M; i++) {
                sums[i * N + j] = D::add(sums[i * N + j], D::load_part(x + i * x_stride + whole, size - whole), weight);
            }
        }
    }
    return sum_each(sums);
}

// M rows of x by `count` rows of w: y[i * y_stride + j].
template <class T, int M, bool AHEAD>
__attribute__((noinline)) static void few_rows(
    const T* x, long x_stride, const T* w, int count, long size, float* y, long y_stride, long ahead
) {
    constexpr int N = LANES / M;
    for (int n = 0; n < count; n += N) {
        const int left = count - n;
        float tile[LANES];
        narrow(tile, dot_tile<T, M, AHEAD>(x, x_stride, w + n * size, size, left - 1, size, ahead));
        for (int i = 0; i < M; i++) memcpy(y + i * y_stride + n, tile + i * N, (left < N ? left : N) * sizeof(float));
    }
}

// Rows of x as the linear layers of one phase read them.
template <class T>
struct Input {
    const T* x;  // [rows, size]
    int rows;
    long size;
    const T* packed;  // the same (pairs.h); nullptr: not used

    // Is there a product that wants them packed?
    static bool packs(long rows, long size) {
        if (!std::is_same_v<T, bf16> || size % PACK_INPUTS) return false;
        return tiles_usable() ? rows >= FEWEST_ROWS_FOR_TILES : DISTSERVE_HAS_PAIRS && rows >= FEWEST_ROWS_FOR_PAIRS;
    }
    static long packed_numbers(long rows, long size) { return (rows + GROUP - 1) / GROUP * GROUP * size; }

    // Rows of one group: `to` is the group's place. See pack_group.
    static void pack(const T* x, int rows, long size, T* to) {
        if constexpr (std::is_same_v<T, bf16>) pack_group(x, size, rows, size, to);
    }

    Input part(int first, int count) const { return {x + first * size, count, size, packed ? packed + first * size : packed}; }
};

static inline void packed_linear(
    const bf16* packed, int rows, const bf16* w, int count, long size, float* y, long y_stride
) {
#if DISTSERVE_HAS_TILES
    if (tiles_usable()) return tile_linear(packed, rows, w, count, size, y, y_stride);
#endif
#if DISTSERVE_HAS_PAIRS
    pair_linear(packed, rows, w, count, size, y, y_stride);
#endif
}

// x by w [count, size], row by row: y [rows, y_stride], in float. Inside a TileScope.
template <class T>
__attribute__((noinline)) static void linear(const Input<T>& in, const T* w, int count, float* y, long y_stride) {
    const long size = in.size;
    int n = 0;
    if constexpr (std::is_same_v<T, bf16>) {
        if (in.packed) {
            n = count - count % GROUP;
            packed_linear(in.packed, in.rows, w, n, size, y, y_stride);
        }
    }
    const int step = in.rows < 4 || LANES * size * (long)sizeof(T) <= NEAR_BYTES ? LANES : 4;
    for (; n < count; n += step) {
        const int some = count - n < step ? count - n : step;
        const T* weights = w + n * size;
        const T* x = in.x;
        float* out = y + n;
        int left = in.rows;
        bool first = true;  // of the passes over these weights: the one that looks ahead
        const auto pass = [&](auto do_ahead, auto do_not, int m) {
            (first ? do_ahead : do_not)(x, size, weights, some, size, out, y_stride, step * size);
            first = false;
            x += m * size;
            out += m * y_stride;
            left -= m;
        };
        while (left >= 4) pass(few_rows<T, 4, true>, few_rows<T, 4, false>, 4);
        if (left >= 2) pass(few_rows<T, 2, true>, few_rows<T, 2, false>, 2);
        if (left) pass(few_rows<T, 1, true>, few_rows<T, 1, false>, 1);
    }
}

}  // namespace distserve

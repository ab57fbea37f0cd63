// Attention of a chunk: tokens of one sequence in a row, up to 32 at a time, over the paged cache. Queries are packed as
// rows of x are (pairs.h) and keys are the weights: scores come out turned, [token][query], so the softmax has a vector of
// queries a token and reduces nothing. Computed as tokens come by, as in attention.h.
#pragma once

#include "attention.h"
#include "rows.h"

namespace distserve {

constexpr int TILE_QUERIES = 2 * GROUP;

#if DISTSERVE_HAS_PAIRS

// Queries of one KV head's heads: `rows` (up to 32) tokens from `position` on.
struct QueryTile {
    const bf16* queries;  // the first token's first head
    bf16* out;
    long stride;  // of both, from token to token
    int rows;
    long position;
    int heads, head_dim;
    long window;  // 0: none
    float scale;
};

// Scratch of one thread for a tile.
class TileRoom {
    char* at;

    template <class N>
    N* take(long count) {
        N* found = reinterpret_cast<N*>(at);
        at += count * sizeof(N);
        return found;
    }

public:
    bf16* queries;       // packed: [heads][2][head_dim / 2][16] pairs
    float* sums;         // [heads][head_dim][32 queries]
    f32x16 *maximum, *total;  // [heads][2]
    uint32_t* values;    // [32 pairs of tokens][head_dim]
    float* scores;       // [64 tokens][32 queries]
    uint32_t* weights;   // packed: [2][32 pairs of tokens][16 queries]

    TileRoom(char* room, int heads, int head_dim) : at(room) {
        queries = take<bf16>(heads * head_dim * TILE_QUERIES), sums = take<float>(heads * head_dim * TILE_QUERIES);
        maximum = take<f32x16>(heads * 2), total = take<f32x16>(heads * 2);
        values = take<uint32_t>(STEP_TOKENS / 2 * head_dim), scores = take<float>(STEP_TOKENS * TILE_QUERIES);
        weights = take<uint32_t>(STEP_TOKENS / 2 * TILE_QUERIES);
    }
    static long bytes(long heads, long head_dim) {
        return heads * (head_dim * TILE_QUERIES * 6 + 4 * sizeof(f32x16)) + STEP_TOKENS / 2 * head_dim * 4 +
               STEP_TOKENS * TILE_QUERIES * 6;
    }
};

// Tokens [at, at + count) of the context: dots of their keys and a head's packed queries.
template <int GROUPS, class Keys>
static void tile_scores(const bf16* queries, long at, int count, long head_dim, const Keys& keys, float* scores) {
    for (int j = 0, run; j < count; j += run) {
        long stride;
        int left;
        const bf16* key = keys(at + j, &stride, &left);  // `left`: tokens in a row from there, `stride` apart
        const Pairs of = {(const uint32_t*)key, stride / 2, 1};
        run = count - j < left ? count - j : left;
        run = run < 8 ? 1 : 8;
        float* out = scores + j * TILE_QUERIES;
        if (run == 8) pair_block<8, GROUPS, false, false>(queries, GROUP * head_dim, of, head_dim / 2, out, TILE_QUERIES);
        else pair_block<1, GROUPS, false, false>(queries, GROUP * head_dim, of, head_dim / 2, out, TILE_QUERIES);
    }
}

// Scores [count][32] of tokens from `at` on become weights, exp(score - maximum), in pairs; returns by how much what was
// summed before shrinks. Sixteen queries, the first at `position`.
static inline f32x16 tile_weights(
    float* scores, long at, int count, long position, long window, float scale, f32x16& maximum, f32x16& total,
    uint32_t* weights
) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool whole = at + count - 1 <= position && (!window || at > position + GROUP - 1 - window);
    const i32x16 last = lane + (int)(position - at);  // the last token that a query sees
    const i32x16 first = window ? last - (int)(window - 1) : lane - lane - 1;
    f32x16 highest = maximum;
    for (int j = 0; j < count; j++) {
        f32x16 score = widen(scores + j * TILE_QUERIES) * scale;
        if (!whole) score = (j <= last) & (j >= first) ? score : broadcast(NOTHING);
        highest = larger(highest, score);
        narrow(scores + j * TILE_QUERIES, score);
    }
    const f32x16 shrink = exponential(maximum - highest);
    maximum = highest;
    f32x16 sum = total * shrink;
    for (int j = 0; j < count; j += 2) {
        f32x16 pair[2];
        for (int i = 0; i < 2; i++) {
            const f32x16 score = j + i < count ? widen(scores + (j + i) * TILE_QUERIES) : broadcast(NOTHING);
            pair[i] = score > NOTHING ? exponential(score - highest) : f32x16{};
            sum += pair[i];
        }
        const u32x16 both = nearest_bf16(pair[0]) >> 16 | nearest_bf16(pair[1]);
        memcpy(weights + j / 2 * GROUP, &both, sizeof both);
    }
    total = sum;
    return shrink;
}

// keys(token, &stride, &left): where a token's keys are; values likewise.
template <int GROUPS, class Keys, class Values>
static void attend_tile(const QueryTile& of, const Keys& keys, const Values& values, char* scratch) {
    const long dim = of.head_dim, end = of.position + of.rows;
    const long begin = of.window && of.position + 1 > of.window ? of.position + 1 - of.window : 0;
    TileRoom room(scratch, of.heads, dim);
    for (int h = 0; h < of.heads; h++) {
        for (int g = 0; g < GROUPS; g++) {
            const int left = of.rows - g * GROUP;
            bf16* packed = room.queries + (h * 2 + g) * GROUP * dim;
            pack_group(of.queries + g * GROUP * of.stride + h * dim, of.stride, left, dim, packed);
            room.maximum[h * 2 + g] = broadcast(NOTHING), room.total[h * 2 + g] = f32x16{};
        }
    }
    memset(room.sums, 0, of.heads * dim * TILE_QUERIES * sizeof(float));
    for (long at = begin; at < end; at += STEP_TOKENS) {
        const int count = end - at < STEP_TOKENS ? end - at : STEP_TOKENS;
        for (int j = 0; j < count; j++) {
            long stride;
            int left;
            const bf16* value = values(at + j, &stride, &left);
            uint32_t* out = room.values + j / 2 * dim;
            for (long d = 0; d < dim; d += LANES) {
                u32x16 bits = (u32x16)widen(value + d);
                bits = j % 2 ? bits | load_vector<u32x16>(out + d) : bits >> 16;
                memcpy(out + d, &bits, sizeof bits);
            }
        }
        for (int h = 0; h < of.heads; h++) {
            float* sums = room.sums + h * dim * TILE_QUERIES;
            tile_scores<GROUPS>(room.queries + h * 2 * GROUP * dim, at, count, dim, keys, room.scores);
            for (int g = 0; g < GROUPS; g++) {
                const f32x16 shrink = tile_weights(
                    room.scores + g * GROUP, at, count, of.position + g * GROUP, of.window, of.scale,
                    room.maximum[h * 2 + g], room.total[h * 2 + g], room.weights + g * STEP_TOKENS / 2 * GROUP
                );
                for (long d = 0; d < dim; d++) {
                    float* sum = sums + d * TILE_QUERIES + g * GROUP;
                    narrow(sum, widen(sum) * shrink);
                }
            }
            for (long d = 0; d < dim; d += 8) {
                pair_block<8, GROUPS, true, false>(
                    (const bf16*)room.weights, STEP_TOKENS * GROUP, {room.values + d, 1, dim}, (count + 1) / 2,
                    sums + d * TILE_QUERIES, TILE_QUERIES
                );
            }
        }
    }
    for (int h = 0; h < of.heads; h++) {
        for (int g = 0; g < GROUPS; g++) {
            const f32x16 factor = 1.0f / room.total[h * 2 + g];
            for (long d = 0; d < dim; d += LANES) {
                f32x16 tile[LANES];
                for (int i = 0; i < LANES; i++) {
                    tile[i] = widen(room.sums + (h * dim + d + i) * TILE_QUERIES + g * GROUP) * factor;
                }
                transpose(tile);
                for (int r = 0; r < GROUP && g * GROUP + r < of.rows; r++) {
                    narrow(of.out + (g * GROUP + r) * of.stride + h * dim + d, tile[r]);
                }
            }
        }
    }
}

#endif

}  // namespace distserve

// Attention of a batch's rows over their sequences' blocks, in items that threads take as they get free: one token's part
// of its context, or a tile of a chunk's tokens with all heads of one KV head.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>

#include "chunks.h"
#include "model.h"
#include "scratch.h"

namespace distserve {

constexpr int MOST_PARTS = 16;   // of one context
constexpr int PART_TOKENS = 64;  // a part has at least as many
constexpr int ITEMS_A_THREAD = 4;

template <class T>
struct Paged {
    const DsModel& model;
    const DsPool& pool;
    const DsBatch& batch;
    const long alone, dim, group, q_width, kv_width;
    int parts;            // of each context of the rows that are alone
    long tile_items = 0;  // of the chunks

    T *q, *attended;  // [rows, heads x head_dim]
    float *partial, *partial_maximum, *partial_total;
    std::atomic<long>* next_item;  // [num_layers]
    char* tile_rooms;  // a thread
    long room_bytes;

    Paged(const DsModel& m, const DsPool& p, const DsBatch& b, int threads)
        : model(m), pool(p), batch(b), alone(b.alone), dim(m.head_dim), group(m.num_heads / m.num_kv_heads),
          q_width(m.num_heads * m.head_dim), kv_width(m.num_kv_heads * m.head_dim) {
        long most = 0;
        for (long r = 0; b.positions && r < alone; r++) most = b.positions[r] + 1 > most ? b.positions[r] + 1 : most;
        long wanted = alone ? (threads * ITEMS_A_THREAD + alone - 1) / alone : 1;
        if (wanted > most / PART_TOKENS) wanted = most / PART_TOKENS;
        for (long c = 0; c < b.num_chunks; c++) tile_items += items_of(c);
        parts = threads == 1 || wanted < 1 ? 1 : wanted > MOST_PARTS ? MOST_PARTS : (int)wanted;
    }

    void lay_out(Scratch& scratch, int for_parts, int threads) {
        scratch.take(partial, alone * q_width * for_parts);
        scratch.take(partial_maximum, alone * model.num_heads * for_parts);
        scratch.take(partial_total, alone * model.num_heads * for_parts);
        scratch.take(next_item, model.num_layers);
        room_bytes = 0;
#if DISTSERVE_HAS_PAIRS
        if (batch.num_chunks) room_bytes = TileRoom::bytes(group, dim);
#endif
        scratch.take(tile_rooms, room_bytes * threads);
    }

    // Before the first of these layers, by one thread.
    void begin(long layer, long stop) {
        for (; layer < stop; layer++) new (&next_item[layer]) std::atomic<long>(0);
    }

    T* slot(long layer, int side, long block) const {
        return (T*)pool.data + block * pool.block_stride + layer * pool.layer_stride + side * pool.side_stride;
    }

    // Work on items until there are none. With parts > 1, merge() of each row's heads completes it, behind a barrier.
    void attend_items(const DsLayer& layer, long number, int thread) {
        Walk walk = {*this, layer, number};
        Ahead steps[2];
        walk.step(steps[0]);
        for (int i = 0; steps[i].count; i ^= 1) {
            walk.step(steps[i ^ 1]);
            attend_step(steps[i], steps[i ^ 1]);
        }
        for (long item = walk.item; item < alone * parts + tile_items; item = claim(number)) {
            attend_tile_item(layer, number, item - alone * parts, thread);
        }
    }

    long claim(long number) { return next_item[number].fetch_add(1, std::memory_order_relaxed); }

    // A step of an item, and which.
    struct Ahead : Step<T> {
        long item;
        bool ends;  // the item
    };

    // The steps of the items that a thread takes, one after the other.
    struct Walk {
        Paged& paged;
        const DsLayer& layer;
        long number;
        long item = -1, token = 0, stop = 0;
        const int32_t* table = nullptr;

        // The next step; none if the thread took an item that is no token's.
        void step(Ahead& found) {
            while (token == stop && item < paged.alone * paged.parts) begin(paged.claim(number));
            const long steps = (stop - token + STEP_TOKENS - 1) / STEP_TOKENS;
            const long even = steps ? ((stop - token + steps - 1) / steps + LANES - 1) / LANES * LANES : 0;
            found.count = (int)std::min(even, stop - token), found.item = item;
            const long size = paged.pool.block_size;
            for (int j = 0; j < found.count; j++, token++) {
                const long at = token % size * paged.kv_width, block = table[token / size];
                found.rows[j] = paged.slot(number, 0, block) + at;
                found.rows[STEP_TOKENS + j] = paged.slot(number, 1, block) + at;
            }
            for (int j = found.count; found.count && j % LANES; j++) found.rows[j] = found.rows[found.count - 1];
            found.ends = token == stop;
        }

        void begin(long next) {
            item = next;
            if (item >= paged.alone * paged.parts) return;
            const long r = item / paged.parts, part = item % paged.parts;
            const long end = paged.batch.positions[r] + 1;
            const long first = layer.window && end > layer.window ? end - layer.window : 0;
            token = first + (end - first) * part / paged.parts, stop = first + (end - first) * (part + 1) / paged.parts;
            table = paged.batch.tables + paged.batch.table_starts[r];
            const long heads = paged.model.num_heads, place = paged.place(item);
            memset(paged.partial + place * paged.dim, 0, heads * paged.dim * sizeof(float));
            std::fill_n(paged.partial_maximum + place, heads, NOTHING), std::fill_n(paged.partial_total + place, heads, 0);
        }
    };

    // Where an item's first head is in what the parts give: [parts, rows, heads].
    long place(long item) const { return (item % parts * alone + item / parts) * model.num_heads; }

    // All heads over a step, while the next one is fetched.
    void attend_step(const Ahead& step, const Ahead& next) {
        const long r = step.item / parts, first = place(step.item);
        Fetch<T> fetch(next, kv_width);
        for (long head = 0, some; head < model.num_heads; head += some) {
            const Attended found = {partial + (first + head) * dim, partial_maximum + first + head, partial_total + first + head};
            const auto call = [&](auto attend_some) {
                attend_some(
                    q + r * q_width + head * dim, step, head / group * dim, dim, model.scale, found,
                    head % group ? nullptr : &fetch
                );
            };
            some = std::min<long>(group - head % group, 4);
            if (some == 4) call(attend<T, 4>);
            else if (some == 3) call(attend<T, 3>);
            else if (some == 2) call(attend<T, 2>);
            else call(attend<T, 1>);
        }
        for (long i = 0; step.ends && parts == 1 && i < model.num_heads; i++) merge(r * model.num_heads + i);
    }

    // The parts of one row's head, made one.
    void merge(long row_head) {
        const long step = alone * model.num_heads;
        float highest = NOTHING, total = 0, factor[MOST_PARTS] = {};
        for (int p = 0; p < parts; p++) {
            const float found = partial_maximum[p * step + row_head];
            highest = found > highest ? found : highest;
        }
        for (int p = 0; p < parts; p++) {
            factor[p] = std::exp(partial_maximum[p * step + row_head] - highest);
            total += factor[p] * partial_total[p * step + row_head];
        }
        by_vectors(dim, [&](long at, int count) {
            f32x16 sums = {};
            for (int p = 0; p < parts; p++) sums += get(partial + (p * step + row_head) * dim + at, count) * factor[p];
            put(attended + row_head * dim + at, sums * (1.0f / total), count);
        });
    }

    // The last tiles of a chunk look back furthest, so they are taken first.
    void attend_tile_item(const DsLayer& layer, long number, long item, int thread) {
#if DISTSERVE_HAS_PAIRS
        long c = 0, first = alone;
        for (; item >= items_of(c); c++) item -= items_of(c), first += batch.chunk_sizes[c];
        const long head = item % model.num_kv_heads;
        const long last_tile = (batch.chunk_sizes[c] - 1) / TILE_QUERIES;
        const long at = (last_tile - item / model.num_kv_heads) * TILE_QUERIES, left = batch.chunk_sizes[c] - at;
        const long place = (first + at) * q_width + head * group * dim;
        const QueryTile tile = {
            (const bf16*)q + place, (bf16*)attended + place, q_width, (int)std::min<long>(left, TILE_QUERIES),
            batch.positions[first + at], (int)group, (int)dim, layer.window, (float)model.scale,
        };
        const int32_t* table = batch.tables + batch.table_starts[first];
        const auto side = [&](int which) {
            return [=](long token, long* stride, int* run) {
                *stride = kv_width, *run = pool.block_size - token % pool.block_size;
                const T* block = slot(number, which, table[token / pool.block_size]);
                return (const bf16*)block + token % pool.block_size * kv_width + head * dim;
            };
        };
        char* room = tile_rooms + room_bytes * thread;
        tile.rows > GROUP ? attend_tile<2>(tile, side(0), side(1), room) : attend_tile<1>(tile, side(0), side(1), room);
#endif
    }

    long items_of(long chunk) const {
        return (batch.chunk_sizes[chunk] + TILE_QUERIES - 1) / TILE_QUERIES * model.num_kv_heads;
    }
};

}  // namespace distserve

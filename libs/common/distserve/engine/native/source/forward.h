// A forward pass of a Llama-like model over a ragged batch, in one call or some layers a call: no Python between layers,
// one team of threads, each intermediate rounded to the model's dtype where the model's own code rounds it.
//
// A layer has five phases with a barrier after each, because the next one reads what all threads wrote:
//   1. x normed; queries, keys and values      (outputs of the three projections dealt out to threads)
//   2. queries and keys turned; KV written      (rows dealt out)
//   3. attention                                (paged.h; dealt out as threads get free)
//   4. output projection added to x             (outputs dealt out)
//   5. x normed; silu(gate) * up, then down added to x, with a barrier between
// What a phase's products read is normed and packed by every thread for itself while rows are few, which is cheaper than
// a barrier; many rows are dealt out, with one more barrier.
#pragma once

#include "barrier.h"
#include "paged.h"

namespace distserve {

constexpr int CHUNK = 64;       // outputs of a projection computed before they are finished and stored
constexpr int SHARED_ROWS = 64;  // above, threads share the work of norms and packing

// Rows that pass a chunk of weights before the next chunk's turn: packed, as many bytes as stay in the second cache.
constexpr long BAND_BYTES = 512 * 1024;
constexpr long FEWEST_BAND_ROWS = 32, MOST_BAND_ROWS = 128;

// Outputs [begin, end) of `width`, in whole vectors, for one of the team.
struct Share {
    long begin, end;
    Share(long width, const Member& me) {
        const long units = (width + LANES - 1) / LANES;
        begin = units * me.thread / me.team * LANES;
        end = units * (me.thread + 1) / me.team * LANES;
        if (end > width) end = width;
    }
};

// work(rows of `in`, the first of them, first output, number of outputs) for outputs of `share`, piece by piece.
template <class T, class F>
static void by_chunks(Share share, const Input<T>& in, F work) {
    const long fits = BAND_BYTES / (in.size * sizeof(T)) / TILE_QUERIES * TILE_QUERIES;
    const long band = std::clamp(fits, FEWEST_BAND_ROWS, MOST_BAND_ROWS);
    for (long row = 0; row < in.rows; row += band) {
        const Input<T> part = in.part(row, std::min(band, in.rows - row));
        for (long at = share.begin; at < share.end; at += CHUNK) {
            work(part, row, at, (int)std::min<long>(CHUNK, share.end - at));
        }
    }
}

template <class T>
struct Projection {
    const T* weight;
    const T* bias;
    T* out;
    long width;
};

template <class T>
struct Forward {
    const DsModel& model;
    const DsPool& pool;
    const DsBatch& batch;
    const int threads;
    const long rows, hidden, inner, q_width, kv_width;
    const bool shares;  // norms and packing
    Paged<T> paged;
    Barrier* barrier;

    // Scratch. `normed` and `packed` are each thread's own, one after the other, unless it shares.
    T *x, *q, *k, *v, *attended, *activated, *normed, *packed;
    long packed_numbers;
    float* chunks;  // two of [MOST_BAND_ROWS, CHUNK] a thread

    Forward(const DsModel& m, const DsPool& p, const DsBatch& b, int n)
        : model(m), pool(p), batch(b), threads(n), rows(b.rows), hidden(m.hidden_size), inner(m.intermediate_size),
          q_width(m.num_heads * m.head_dim), kv_width(m.num_kv_heads * m.head_dim), shares(rows > SHARED_ROWS),
          paged(m, p, b, n) {}

    // for_parts: room for contexts in so many parts.
    void lay_out(Scratch& scratch, int for_parts) {
        scratch.take(x, rows * hidden), scratch.take(q, rows * q_width);
        scratch.take(k, rows * kv_width), scratch.take(v, rows * kv_width);
        scratch.take(attended, rows * q_width), scratch.take(activated, rows * inner);
        scratch.take(barrier, 1);
        packed_numbers = Input<T>::packed_numbers(rows, std::max({hidden, q_width, inner}));
        scratch.take(normed, rows * hidden * (shares ? 1 : threads));
        scratch.take(packed, packed_numbers * (shares ? 1 : threads));
        scratch.take(chunks, threads * 2 * chunk_numbers());
        paged.lay_out(scratch, for_parts, threads);
        paged.q = q, paged.attended = attended;
    }

    long chunk_numbers() const { return std::min(rows, MOST_BAND_ROWS) * CHUNK; }
    float* chunk(int thread, int which) { return chunks + (2 * thread + which) * chunk_numbers(); }

    // Layers [first, stop), by each of the me.team, who are at most `threads`.
    void run(long first, long stop, Member& me) {
        [[maybe_unused]] const TileScope tiles;
        if (first == 0) {
            for (long r = me.thread; r < rows; r += me.team) {
                memcpy(x + r * hidden, (const T*)model.embedding + batch.token_ids[r] * hidden, hidden * sizeof(T));
            }
            me.wait();
        }
        for (long n = first; n < stop; n++) {
            const DsLayer& layer = model.layers[n];
            project_qkv(layer, me);
            me.wait();
            for (long r = me.thread; r < rows; r += me.team) turn_and_write(layer, n, r);
            me.wait();
            paged.attend_items(layer, n, me.thread);
            me.wait();
            if (paged.parts > 1) {
                for (long i = me.thread; i < paged.alone * model.num_heads; i += me.team) paged.merge(i);
                me.wait();
            }
            add_projection(attended, q_width, layer.o, me);
            me.wait();
            gate_and_up(layer, me);
            me.wait();
            add_projection(activated, inner, layer.down, me);
            me.wait();
        }
        if (stop < model.num_layers) return;
        for (long r = me.thread; r < rows; r += me.team) {
            T* out = (T*)batch.hidden + r * hidden;
            rms_norm(out, x + r * hidden, (const T*)model.final_norm, hidden, model.norm_eps);
        }
    }

    // `from` [rows, size], normed by `norm` if there is one, as products read it.
    Input<T> prepare(const T* from, long size, const void* norm, Member& me) {
        const bool packs = Input<T>::packs(rows, size);
        T* to = normed + (shares ? 0 : rows * hidden * me.thread);
        T* pack_to = packed + (shares ? 0 : packed_numbers * me.thread);
        const long step = shares ? me.team : 1;
        for (long r = (shares ? me.thread : 0) * GROUP; r < rows; r += step * GROUP) {
            const long some = std::min<long>(GROUP, rows - r);
            for (long i = r; norm && i < r + some; i++) {
                rms_norm(to + i * size, from + i * size, (const T*)norm, size, model.norm_eps);
            }
            if (packs) Input<T>::pack((norm ? to : from) + r * size, some, size, pack_to + r * size);
        }
        if (shares && (norm || packs)) me.wait();
        return {norm ? to : from, (int)rows, size, packs ? pack_to : nullptr};
    }

    void project_qkv(const DsLayer& layer, Member& me) {
        const Projection<T> all[] = {
            {(const T*)layer.q, (const T*)layer.q_bias, q, q_width},
            {(const T*)layer.k, (const T*)layer.k_bias, k, kv_width},
            {(const T*)layer.v, (const T*)layer.v_bias, v, kv_width},
        };
        const Share mine(q_width + 2 * kv_width, me);  // of the three side by side
        const Input<T> in = prepare(x, hidden, layer.input_norm, me);
        float* y = chunk(me.thread, 0);
        long start = 0;
        for (const Projection<T>& to : all) {
            Share share = mine;
            share.begin = share.begin > start ? share.begin - start : 0;
            share.end = share.end - start < to.width ? share.end - start : to.width;
            start += to.width;
            by_chunks(share, in, [&](const Input<T>& part, long row, long at, int num) {
                linear(part, to.weight + at * hidden, num, y, CHUNK);
                for (long r = 0; r < part.rows; r++) {
                    by_vectors(num, [&](long i, int count) {
                        f32x16 value = get(y + r * CHUNK + i, count);
                        if (to.bias) value += get(to.bias + at + i, count);
                        put(to.out + (row + r) * to.width + at + i, value, count);
                    });
                }
            });
        }
    }

    void turn_and_write(const DsLayer& layer, long number, long r) {
        const long dim = model.head_dim, half = dim / 2, position = batch.positions[r];
        const T *cos = (const T*)model.cos + position * half, *sin = (const T*)model.sin + position * half;
        const auto turn = [&](T* heads, long count, const void* norm) {
            for (T* head = heads; head < heads + count * dim; head += dim) {
                if (norm) rms_norm(head, head, (const T*)norm, dim, model.norm_eps);
                rotate(head, cos, sin, half);
            }
        };
        turn(q + r * q_width, model.num_heads, layer.q_norm);
        turn(k + r * kv_width, model.num_kv_heads, layer.k_norm);
        const long at = batch.slot_offsets[r] * kv_width;
        memcpy(paged.slot(number, 0, batch.slot_blocks[r]) + at, k + r * kv_width, kv_width * sizeof(T));
        memcpy(paged.slot(number, 1, batch.slot_blocks[r]) + at, v + r * kv_width, kv_width * sizeof(T));
    }

    void add_projection(const T* from, long size, const void* weight, Member& me) {
        const Input<T> in = prepare(from, size, nullptr, me);
        float* y = chunk(me.thread, 0);
        by_chunks(Share(hidden, me), in, [&](const Input<T>& part, long row, long at, int num) {
            linear(part, (const T*)weight + at * size, num, y, CHUNK);
            for (long r = 0; r < part.rows; r++) {
                T* sums = x + (row + r) * hidden + at;
                by_vectors(num, [&](long i, int count) {
                    put(sums + i, get(sums + i, count) + rounded<T>(get(y + r * CHUNK + i, count)), count);
                });
            }
        });
    }

    void gate_and_up(const DsLayer& layer, Member& me) {
        const Input<T> in = prepare(x, hidden, layer.post_norm, me);
        float *gates = chunk(me.thread, 0), *ups = chunk(me.thread, 1);
        by_chunks(Share(inner, me), in, [&](const Input<T>& part, long row, long at, int num) {
            linear(part, (const T*)layer.gate + at * hidden, num, gates, CHUNK);
            linear(part, (const T*)layer.up + at * hidden, num, ups, CHUNK);
            for (long r = 0; r < part.rows; r++) {
                by_vectors(num, [&](long i, int count) {
                    const f32x16 gate = rounded<T>(get(gates + r * CHUNK + i, count));
                    const f32x16 up = rounded<T>(get(ups + r * CHUNK + i, count));
                    put(activated + (row + r) * inner + at + i, silu<T>(gate) * up, count);
                });
            }
        });
    }
};

}  // namespace distserve

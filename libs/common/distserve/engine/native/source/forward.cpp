// A forward pass of a Llama-like model over a ragged batch of few tokens, in one call: no Python between layers, one team
// of threads, each intermediate rounded to the model's dtype where the model's own code rounds it.
//
// A layer has five phases with a barrier after each, because the next one reads what all threads wrote:
//   1. x normed; queries, keys and values      (outputs of the three projections dealt out to threads)
//   2. queries and keys turned; KV written      (tokens dealt out)
//   3. attention                                (token x part of the context, dealt out as threads get free)
//   4. output projection added to x             (outputs dealt out)
//   5. x normed; silu(gate) * up, then down added to x, with a barrier between
// The norms are computed by every thread for itself: cheaper than a barrier at the sizes this is for.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>

#include "attention.h"

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
static int omp_get_num_threads() { return 1; }
#endif

using namespace distserve;

extern "C" {

// The structures below are mirrored in structures.py, field by field.

struct DsLayer {
    const void *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *post_norm, *gate, *up, *down;
    int64_t window;  // tokens a query sees, itself included; 0: all
};

struct DsModel {
    int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    double norm_eps, scale;
    const DsLayer* layers;
    const void *embedding, *final_norm, *cos, *sin;  // cos, sin [positions, head_dim / 2]
};

struct DsPool {
    void* data;
    int64_t block_stride, layer_stride, side_stride;  // in numbers
    int64_t block_size;
};

struct DsBatch {
    int64_t rows;
    const int64_t *token_ids, *positions, *slot_blocks, *slot_offsets;  // [rows]
    const int32_t* tables;                                               // all block tables, one after the other
    const int64_t* table_starts;                                         // [rows]: where a row's begins
    void* hidden;                                                        // out: [rows, hidden_size]
};

}  // extern "C"

namespace {

constexpr int CHUNK = 64;         // outputs of a projection computed before they are finished and stored
constexpr int MOST_PARTS = 16;    // of one context
constexpr int PART_TOKENS = 64;  // a part has at least as many
constexpr int ITEMS_A_THREAD = 4;

long padded(long bytes) { return (bytes + 63) / 64 * 64; }

// Outputs [begin, end) of `width`, in whole vectors, for one of `threads`.
struct Share {
    long begin, end;
    Share(long width, int thread, int threads) {
        const long units = (width + LANES - 1) / LANES;
        begin = units * thread / threads * LANES;
        end = units * (thread + 1) / threads * LANES;
        if (end > width) end = width;
    }
};

// Calls work(at, count) for each sixteen (the last time: fewer) of [0, size).
template <class F>
inline void by_vectors(long size, F work) {
    long at = 0;
    for (; at + LANES <= size; at += LANES) work(at, LANES);
    if (at < size) work(at, (int)(size - at));
}

template <class T>
inline f32x16 get(const T* from, int count) {
    return count == LANES ? widen(from) : widen_part(from, count);
}

template <class T>
inline void put(T* to, f32x16 value, int count) {
    if (count == LANES) narrow(to, value);
    else narrow_part(to, value, count);
}

// weight * (x / rms(x)), each product rounded to T. In place is fine.
template <class T>
void rms_norm(T* out, const T* x, const T* weight, long size, float eps) {
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
inline f32x16 silu(f32x16 x) {
    return rounded<T>(x / (1.0f + exponential(-x)));
}

// Rotary embedding of one head, the halves as pairs (Su et al., "RoFormer", 2021, in the order of GPT-NeoX).
template <class T>
void rotate(T* head, const T* cos, const T* sin, long half) {
    by_vectors(half, [&](long at, int count) {
        const f32x16 a = get(head + at, count), b = get(head + half + at, count);
        const f32x16 c = get(cos + at, count), s = get(sin + at, count);
        put(head + at, rounded<T>(a * c) + rounded<T>(-b * s), count);
        put(head + half + at, rounded<T>(b * c) + rounded<T>(a * s), count);
    });
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
    int parts;  // of each context

    // Scratch, shared by the threads.
    T *x, *q, *k, *v, *attended, *activated;
    float *partial, *partial_maximum, *partial_total;
    char* own;  // the threads' own, one after the other
    long own_bytes, normed_bytes, chunk_bytes;
    std::atomic<long>* next_item;  // [num_layers]

    Forward(const DsModel& m, const DsPool& p, const DsBatch& b, int n)
        : model(m), pool(p), batch(b), threads(n), rows(b.rows), hidden(m.hidden_size), inner(m.intermediate_size),
          q_width(m.num_heads * m.head_dim), kv_width(m.num_kv_heads * m.head_dim) {
        long most = 0;
        for (long r = 0; b.positions && r < rows; r++) most = b.positions[r] + 1 > most ? b.positions[r] + 1 : most;
        long wanted = (threads * ITEMS_A_THREAD + rows - 1) / rows;
        if (wanted > most / PART_TOKENS) wanted = most / PART_TOKENS;
        parts = threads == 1 || wanted < 1 ? 1 : wanted > MOST_PARTS ? MOST_PARTS : (int)wanted;
    }

    // Lays the scratch out from `base` on (nullptr: only reckons); returns its size. `for_parts`: room for so many.
    long lay_out(char* base, int for_parts) {
        long at = 0;
        const auto take = [&](auto*& place, long count) {
            place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(base + at);
            at += padded(count * sizeof(*place));
        };
        take(x, rows * hidden), take(q, rows * q_width), take(k, rows * kv_width), take(v, rows * kv_width);
        take(attended, rows * q_width), take(activated, rows * inner);
        take(partial, rows * q_width * for_parts);
        take(partial_maximum, rows * model.num_heads * for_parts), take(partial_total, rows * model.num_heads * for_parts);
        take(next_item, model.num_layers);
        const long widest = std::max({hidden, q_width, inner});
        normed_bytes = padded(rows * hidden * sizeof(T)), chunk_bytes = padded(rows * CHUNK * sizeof(float));
        own_bytes = normed_bytes + 2 * chunk_bytes + padded(Input<T>::room_for(rows, widest) * sizeof(T));
        own = base + at;
        return at + own_bytes * threads;
    }

    T* own_normed(int thread) { return reinterpret_cast<T*>(own + own_bytes * thread); }
    float* own_chunk(int thread, int which) {
        return reinterpret_cast<float*>(own + own_bytes * thread + normed_bytes + which * chunk_bytes);
    }
    T* own_room(int thread) {
        return reinterpret_cast<T*>(own + own_bytes * thread + normed_bytes + 2 * chunk_bytes);
    }

    void run() {
        for (long n = 0; n < model.num_layers; n++) new (&next_item[n]) std::atomic<long>(0);
#pragma omp parallel num_threads(threads)
        team_member(omp_get_thread_num(), omp_get_num_threads());
    }

    // `team`: how many threads there are in fact, at most `threads`.
    void team_member(int thread, int team) {
        [[maybe_unused]] const TileScope tiles;
        T* normed = own_normed(thread);
        for (long r = thread; r < rows; r += team) {
            memcpy(x + r * hidden, (const T*)model.embedding + batch.token_ids[r] * hidden, hidden * sizeof(T));
        }
#pragma omp barrier
        for (long n = 0; n < model.num_layers; n++) {
            const DsLayer& layer = model.layers[n];
            norm_rows(normed, x, layer.input_norm);
            project_qkv(layer, normed, thread, team);
#pragma omp barrier
            for (long r = thread; r < rows; r += team) turn_and_write(layer, n, r);
#pragma omp barrier
            attend_items(layer, n);
#pragma omp barrier
            if (parts > 1) {
                for (long i = thread; i < rows * model.num_heads; i += team) merge(i);
#pragma omp barrier
            }
            add_projection(attended, q_width, layer.o, thread, team);
#pragma omp barrier
            norm_rows(normed, x, layer.post_norm);
            gate_and_up(layer, normed, thread, team);
#pragma omp barrier
            add_projection(activated, inner, layer.down, thread, team);
#pragma omp barrier
        }
        for (long r = thread; r < rows; r += team) {
            T* out = (T*)batch.hidden + r * hidden;
            rms_norm(out, x + r * hidden, (const T*)model.final_norm, hidden, model.norm_eps);
        }
    }

    void norm_rows(T* out, const T* in, const void* weight) {
        for (long r = 0; r < rows; r++) {
            rms_norm(out + r * hidden, in + r * hidden, (const T*)weight, hidden, model.norm_eps);
        }
    }

    // Outputs of `share` of `in` by weight, in chunks: finish(row, first output, their number, values).
    template <class F>
    void by_chunks(Share share, const Input<T>& in, const T* weight, float* chunk, F finish) {
        for (long at = share.begin; at < share.end; at += CHUNK) {
            const int count = share.end - at < CHUNK ? share.end - at : CHUNK;
            linear(in, weight + at * in.size, count, chunk, CHUNK);
            for (long r = 0; r < rows; r++) finish(r, at, count, chunk + r * CHUNK);
        }
    }

    void project_qkv(const DsLayer& layer, const T* normed, int thread, int team) {
        const Projection<T> all[] = {
            {(const T*)layer.q, (const T*)layer.q_bias, q, q_width},
            {(const T*)layer.k, (const T*)layer.k_bias, k, kv_width},
            {(const T*)layer.v, (const T*)layer.v_bias, v, kv_width},
        };
        const Share mine(q_width + 2 * kv_width, thread, team);  // of the three side by side
        const Input<T> in(normed, rows, hidden, own_room(thread));
        long start = 0;
        for (const Projection<T>& part : all) {
            Share share = mine;
            share.begin = share.begin > start ? share.begin - start : 0;
            share.end = share.end - start < part.width ? share.end - start : part.width;
            start += part.width;
            by_chunks(share, in, part.weight, own_chunk(thread, 0), [&](long r, long at, int num, float* y) {
                by_vectors(num, [&](long i, int count) {
                    f32x16 value = get(y + i, count);
                    if (part.bias) value += get(part.bias + at + i, count);
                    put(part.out + r * part.width + at + i, value, count);
                });
            });
        }
    }

    T* slot(long layer, int side, long block) {
        return (T*)pool.data + block * pool.block_stride + layer * pool.layer_stride + side * pool.side_stride;
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
        memcpy(slot(number, 0, batch.slot_blocks[r]) + at, k + r * kv_width, kv_width * sizeof(T));
        memcpy(slot(number, 1, batch.slot_blocks[r]) + at, v + r * kv_width, kv_width * sizeof(T));
    }

    void attend_items(const DsLayer& layer, long number) {
        const long items = rows * parts;
        for (long item; (item = next_item[number].fetch_add(1, std::memory_order_relaxed)) < items;) {
            const long r = item / parts, part = item % parts;
            const long end = batch.positions[r] + 1;
            const long begin = layer.window && end > layer.window ? end - layer.window : 0;
            const long first_block = begin / pool.block_size, blocks = (end - 1) / pool.block_size + 1 - first_block;
            attend_blocks(
                number, r, part, first_block + blocks * part / parts, first_block + blocks * (part + 1) / parts, begin, end
            );
        }
    }

    // All heads of row r over its sequence's blocks [from, to), as far as tokens [begin, end) go. Block by block, so
    // that memory is read in the order it lies in.
    void attend_blocks(long number, long r, long part, long from, long to, long begin, long end) {
        const long dim = model.head_dim, size = pool.block_size, group = model.num_heads / model.num_kv_heads;
        const int32_t* table = batch.tables + batch.table_starts[r];
        const long first = (part * rows + r) * model.num_heads;  // partial results: [parts, rows, heads]
        memset(partial + first * dim, 0, model.num_heads * dim * sizeof(float));
        for (long i = first; i < first + model.num_heads; i++) partial_maximum[i] = NOTHING, partial_total[i] = 0;
        for (long b = from; b < to; b++) {
            if (b + 1 < to) {
                fetch_ahead(slot(number, 0, table[b + 1]));
                fetch_ahead(slot(number, 1, table[b + 1]));
            }
            const T *keys = slot(number, 0, table[b]), *values = slot(number, 1, table[b]);
            const int low = begin > b * size ? begin - b * size : 0;
            const int high = end - b * size < size ? end - b * size : size;
            for (long head = 0, step; head < model.num_heads; head += step) {
                const long left = group - head % group;
                const Attended found = {partial + (first + head) * dim, partial_maximum + first + head, partial_total + first + head};
                const auto call = [&](auto attend_some) {
                    const long at = head / group * dim;
                    attend_some(
                        q + r * q_width + head * dim, keys + at, values + at, kv_width, low, high, dim, model.scale, found
                    );
                };
                step = left < 4 ? left : 4;
                if (step == 4) call(attend<T, 4>);
                else if (step == 3) call(attend<T, 3>);
                else if (step == 2) call(attend<T, 2>);
                else call(attend<T, 1>);
            }
        }
        for (long i = 0; parts == 1 && i < model.num_heads; i++) merge(r * model.num_heads + i);
    }

    // Asks for a layer's keys or values of one block, so that they are near when it is their turn.
    void fetch_ahead(const T* side) {
        for (long at = 0; at < pool.block_size * kv_width; at += 64 / sizeof(T)) __builtin_prefetch(side + at);
    }

    // The parts of one row's head, made one.
    void merge(long row_head) {
        const long dim = model.head_dim, step = rows * model.num_heads;
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

    void add_projection(const T* from, long size, const void* weight, int thread, int team) {
        const Share share(hidden, thread, team);
        const Input<T> in(from, rows, size, own_room(thread));
        by_chunks(share, in, (const T*)weight, own_chunk(thread, 0), [&](long r, long at, int num, float* y) {
            T* sums = x + r * hidden + at;
            by_vectors(num, [&](long i, int count) {
                put(sums + i, get(sums + i, count) + rounded<T>(get(y + i, count)), count);
            });
        });
    }

    void gate_and_up(const DsLayer& layer, const T* normed, int thread, int team) {
        float *gates = own_chunk(thread, 0), *ups = own_chunk(thread, 1);
        const Share share(inner, thread, team);
        const Input<T> in(normed, rows, hidden, own_room(thread));
        by_chunks(share, in, (const T*)layer.gate, gates, [&](long r, long at, int num, float* gate) {
            if (r == 0) linear(in, (const T*)layer.up + at * hidden, num, ups, CHUNK);
            by_vectors(num, [&](long i, int count) {
                const f32x16 g = rounded<T>(get(gate + i, count)), up = rounded<T>(get(ups + r * CHUNK + i, count));
                put(activated + r * inner + at + i, silu<T>(g) * up, count);
            });
        });
    }
};

// What is compiled: one library a dtype, which takes a third of the time.
#if DISTSERVE_DTYPE == 0
typedef float Number;
#elif DISTSERVE_DTYPE == 1
typedef bf16 Number;
#else
typedef f16 Number;
#endif

}  // namespace

extern "C" {

// Bytes of scratch that a pass of `rows` rows may need.
int64_t distserve_scratch_bytes(const DsModel* model, int64_t rows, int64_t threads) {
    const DsPool pool = {};
    DsBatch batch = {};
    batch.rows = rows;
    return Forward<Number>(*model, pool, batch, threads).lay_out(nullptr, MOST_PARTS) + 64;
}

// One pass; `scratch` as large as distserve_scratch_bytes says.
void distserve_forward(const DsModel* model, const DsPool* pool, const DsBatch* batch, void* scratch, int64_t threads) {
    Forward<Number> forward(*model, *pool, *batch, threads);
    forward.lay_out(reinterpret_cast<char*>(padded(reinterpret_cast<intptr_t>(scratch))), forward.parts);
    forward.run();
}

// The parts of a pass over many tokens, between whose calls the matrix products are made by others. All row by row.

// x [rows, hidden_size] = the embeddings of the batch's tokens; normed = those, normed for the first layer.
void distserve_embed(const DsModel* model, const DsBatch* batch, void* x, void* normed, int64_t threads) {
    const long size = model->hidden_size;
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < batch->rows; r++) {
        Number* row = (Number*)x + r * size;
        memcpy(row, (const Number*)model->embedding + batch->token_ids[r] * size, size * sizeof(Number));
        rms_norm((Number*)normed + r * size, row, (const Number*)model->layers[0].input_norm, size, model->norm_eps);
    }
}

// x += y, normed = x normed with `weight`; each [rows, hidden_size].
void distserve_add_and_norm(
    const DsModel* model, int64_t rows, void* x, const void* y, const void* weight, void* normed, int64_t threads
) {
    const long size = model->hidden_size;
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < rows; r++) {
        Number* sums = (Number*)x + r * size;
        const Number* more = (const Number*)y + r * size;
        by_vectors(size, [&](long at, int count) { put(sums + at, get(sums + at, count) + get(more + at, count), count); });
        rms_norm((Number*)normed + r * size, sums, (const Number*)weight, size, model->norm_eps);
    }
}

// gate = silu(gate) * up; `count` numbers each.
void distserve_silu_and_multiply(void* gate, const void* up, int64_t count, int64_t threads) {
    constexpr long PIECE = 4096;
#pragma omp parallel for num_threads(threads)
    for (long begin = 0; begin < count; begin += PIECE) {
        by_vectors(count - begin < PIECE ? count - begin : PIECE, [&](long at, int some) {
            Number* g = (Number*)gate + begin + at;
            put(g, silu<Number>(get(g, some)) * get((const Number*)up + begin + at, some), some);
        });
    }
}

// Turns queries [rows, heads x head_dim] and keys in place, and writes keys and values to the cache.
void distserve_turn_and_write(
    const DsModel* model, const DsPool* pool, const DsBatch* batch, int64_t layer, void* q, void* k, void* v,
    int64_t threads
) {
    Forward<Number> forward(*model, *pool, *batch, threads);
    forward.q = (Number*)q, forward.k = (Number*)k, forward.v = (Number*)v;
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < batch->rows; r++) forward.turn_and_write(model->layers[layer], layer, r);
}

// Attention of the first `rows` tokens of the batch over their contexts: out [rows, heads x head_dim].
void distserve_attend(
    const DsModel* model, const DsPool* pool, const DsBatch* batch, int64_t rows, int64_t layer, void* q, void* out,
    void* scratch, int64_t threads
) {
    DsBatch some = *batch;
    some.rows = rows;
    Forward<Number> forward(*model, *pool, some, threads);
    forward.lay_out(reinterpret_cast<char*>(padded(reinterpret_cast<intptr_t>(scratch))), forward.parts);
    forward.q = (Number*)q, forward.attended = (Number*)out;
    new (&forward.next_item[layer]) std::atomic<long>(0);
#pragma omp parallel num_threads(threads)
    forward.attend_items(model->layers[layer], layer);
    if (forward.parts == 1) return;
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows * model->num_heads; i++) forward.merge(i);
}

// y [rows, outputs] = x [rows, size] w [outputs, size]^T, all in the dtype.
void distserve_linear(
    const void* x, int64_t rows, const void* w, int64_t outputs, int64_t size, void* y, int64_t threads
) {
#pragma omp parallel num_threads(threads)
    {
        const Share share(outputs, omp_get_thread_num(), omp_get_num_threads());
        [[maybe_unused]] const TileScope tiles;
        std::unique_ptr<float[]> chunk(new float[rows * CHUNK]);
        std::unique_ptr<Number[]> room(new Number[Input<Number>::room_for(rows, size)]);
        const Input<Number> in((const Number*)x, rows, size, room.get());
        for (long at = share.begin; at < share.end; at += CHUNK) {
            const int num = share.end - at < CHUNK ? share.end - at : CHUNK;
            linear(in, (const Number*)w + at * size, num, chunk.get(), CHUNK);
            for (long r = 0; r < rows; r++) {
                by_vectors(num, [&](long i, int count) {
                    put((Number*)y + r * outputs + at + i, get(chunk.get() + r * CHUNK + i, count), count);
                });
            }
        }
    }
}

}  // extern "C"

// The library's entry points. Numbers and addresses come as 64 bits, structures by reference (model.h).
#include <memory>

#include "forward.h"

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
static int omp_get_num_threads() { return 1; }
#endif

using namespace distserve;

namespace {

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

// Does a pass take chunks (DsBatch), and so any number of rows? Else all rows must be alone.
int64_t distserve_takes_chunks() { return DISTSERVE_HAS_PAIRS && std::is_same_v<Number, bf16>; }

// Bytes of scratch that a pass may need of `rows` rows, the first `alone` of them no part of a chunk.
int64_t distserve_scratch_bytes(const DsModel* model, int64_t rows, int64_t alone, int64_t threads) {
    const DsPool pool = {};
    DsBatch batch = {};
    batch.rows = rows, batch.alone = alone;
    Forward<Number> forward(*model, pool, batch, threads);
    batch.num_chunks = rows > alone;
    Scratch scratch(nullptr);
    forward.lay_out(scratch, MOST_PARTS);
    return scratch.bytes() + 63;
}

// Layers [first, stop) of a pass, in order; `room` as large as distserve_scratch_bytes says, the same from the first to
// the last layer. The last writes batch->hidden.
void distserve_forward(
    const DsModel* model, const DsPool* pool, const DsBatch* batch, void* room, int64_t first, int64_t stop,
    int64_t threads
) {
    Forward<Number> forward(*model, *pool, *batch, threads);
    Scratch scratch(room);
    forward.lay_out(scratch, forward.paged.parts);
    forward.paged.begin(first, stop);
    new (forward.barrier) Barrier;
#pragma omp parallel num_threads(threads)
    {
        Member me = {omp_get_thread_num(), omp_get_num_threads(), *forward.barrier};
        forward.run(first, stop, me);
    }
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
    void* room, int64_t threads
) {
    DsBatch some = *batch;
    some.rows = some.alone = rows, some.num_chunks = 0;
    Paged<Number> paged(*model, *pool, some, threads);
    Scratch scratch(room);
    paged.lay_out(scratch, paged.parts, threads);
    paged.begin(layer, layer + 1);
    paged.q = (Number*)q, paged.attended = (Number*)out;
#pragma omp parallel num_threads(threads)
    paged.attend_items(model->layers[layer], layer, omp_get_thread_num());
    if (paged.parts == 1) return;
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows * model->num_heads; i++) paged.merge(i);
}

// y [rows, outputs] = x [rows, size] w [outputs, size]^T, all in the dtype.
void distserve_linear(
    const void* x, int64_t rows, const void* w, int64_t outputs, int64_t size, void* y, int64_t threads
) {
    const bool packs = Input<Number>::packs(rows, size);
    std::unique_ptr<Number[]> packed(new Number[packs ? Input<Number>::packed_numbers(rows, size) : 0]);
    const Input<Number> in = {(const Number*)x, (int)rows, size, packs ? packed.get() : nullptr};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (long r = 0; r < (packs ? rows : 0); r += GROUP) {
            Input<Number>::pack((const Number*)x + r * size, rows - r, size, packed.get() + r * size);
        }
        [[maybe_unused]] const TileScope tiles;
        std::unique_ptr<float[]> chunk(new float[std::min<long>(rows, MOST_BAND_ROWS) * CHUNK]);
        Barrier unused;
        const Share share(outputs, Member{omp_get_thread_num(), omp_get_num_threads(), unused});
        by_chunks(share, in, [&](const Input<Number>& part, long row, long at, int num) {
            linear(part, (const Number*)w + at * size, num, chunk.get(), CHUNK);
            for (long r = 0; r < part.rows; r++) {
                by_vectors(num, [&](long i, int count) {
                    put((Number*)y + (row + r) * outputs + at + i, get(chunk.get() + r * CHUNK + i, count), count);
                });
            }
        });
    }
}

}  // extern "C"

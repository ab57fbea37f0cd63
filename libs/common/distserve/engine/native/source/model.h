// What Python hands over, mirrored in structures.py field by field.
#pragma once

#include <cstdint>

extern "C" {

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

// Rows [0, alone) are tokens whose attention is computed one by one; behind them are chunks, each of so many tokens of
// one sequence in a row.
struct DsBatch {
    int64_t rows, alone, num_chunks;
    const int64_t *token_ids, *positions, *slot_blocks, *slot_offsets;  // [rows]
    const int32_t* tables;                                               // all block tables, one after the other
    const int64_t* table_starts;                                         // [rows]: where a row's begins
    const int64_t* chunk_sizes;                                          // [num_chunks]
    void* hidden;                                                        // out: [rows, hidden_size]
};

}  // extern "C"

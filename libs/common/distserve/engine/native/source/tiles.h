// Intel's matrix tiles (AMX-BF16): sixteen weights' rows by up to 64 rows of x in an instruction for each 32 inputs.
//
// One operand of the tile product is sixteen rows of W just as they lie in the model; the other is x, packed (pairs.h): 16
// pairs of 16 rows are a tile. The outcome is y turned: [16 outputs][16 rows].
// Where the instructions are missing, or the kernel doesn't allow them, tiles_usable() is false and nothing here runs.
#pragma once

#include "pairs.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define DISTSERVE_HAS_TILES 1
#endif

namespace distserve {

constexpr int TILE = GROUP;  // rows of W, rows of x, and pairs of inputs in a tile
constexpr int TILE_NUMBERS = TILE * PACK_INPUTS;

#if DISTSERVE_HAS_TILES

// The kernel gives a process the tiles' registers when it asks (arch_prctl(2), ARCH_REQ_XCOMP_PERM).
static inline bool tiles_usable() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

// GCC doesn't count all that tile instructions read and write: memory must be as written before them, and be read after.
static inline void settle_memory() { asm volatile("" ::: "memory"); }

// While it lives, this thread's tiles are six of 16 rows by 64 bytes; then what they were.
class TileScope {
    struct alignas(64) Config {
        uint8_t palette = 0, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    Config before;

public:
    TileScope() {
        if (!tiles_usable()) return;
        _tile_storeconfig(&before);
        settle_memory();
        Config ours;
        ours.palette = 1;
        for (int i = 0; i < 6; i++) ours.row_bytes[i] = 64, ours.rows[i] = TILE;
        settle_memory();
        _tile_loadconfig(&ours);
    }
    ~TileScope() {
        if (!tiles_usable()) return;
        settle_memory();
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

// One block of 16 outputs by GROUPS times 16 rows of x.
template <int GROUPS>
static inline void tile_block(
    const bf16* packed, long group_numbers, const bf16* w, long size, bool ahead, float* y, long y_stride, int rows
) {
    _tile_zero(0);
    if (GROUPS > 1) _tile_zero(1);
    if (GROUPS > 2) _tile_zero(2);
    if (GROUPS > 3) _tile_zero(3);
    for (long k = 0; k < size; k += PACK_INPUTS, packed += TILE_NUMBERS) {
        if (ahead) {
            for (int j = 0; j < TILE; j++) __builtin_prefetch(w + (TILE + j) * size + k, 0, 2);
        }
        _tile_loadd(4, w + k, size * sizeof(bf16));
        _tile_loadd(5, packed, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (GROUPS > 1) {
            _tile_loadd(5, packed + group_numbers, 64);
            _tile_dpbf16ps(1, 4, 5);
        }
        if (GROUPS > 2) {
            _tile_loadd(5, packed + 2 * group_numbers, 64);
            _tile_dpbf16ps(2, 4, 5);
        }
        if (GROUPS > 3) {
            _tile_loadd(5, packed + 3 * group_numbers, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    alignas(64) float turned[GROUPS][TILE][TILE];  // [16 outputs][16 rows]
    _tile_stored(0, turned[0], 64);
    if (GROUPS > 1) _tile_stored(1, turned[1], 64);
    if (GROUPS > 2) _tile_stored(2, turned[2], 64);
    if (GROUPS > 3) _tile_stored(3, turned[3], 64);
    settle_memory();
    for (int g = 0; g < GROUPS; g++) {
        f32x16 tile[TILE];
        for (int j = 0; j < TILE; j++) tile[j] = widen(turned[g][j]);
        transpose(tile);
        for (int r = 0; r < TILE && g * TILE + r < rows; r++) narrow(y + (g * TILE + r) * y_stride, tile[r]);
    }
}

// Outputs [0, count) of w, count a multiple of 16, for `rows` packed rows. Inside a TileScope.
[[maybe_unused]] static void tile_linear(
    const bf16* packed, int rows, const bf16* w, int count, long size, float* y, long y_stride
) {
    settle_memory();
    const long group_numbers = TILE * size;
    for (int n = 0; n < count; n += TILE) {
        for (int first = 0; first < rows; first += 4 * TILE) {
            const int some = rows - first < 4 * TILE ? rows - first : 4 * TILE;
            const bf16* in = packed + first * size;
            float* out = y + first * y_stride + n;
            switch ((some + TILE - 1) / TILE) {
                case 1: tile_block<1>(in, group_numbers, w + n * size, size, first == 0, out, y_stride, some); break;
                case 2: tile_block<2>(in, group_numbers, w + n * size, size, first == 0, out, y_stride, some); break;
                case 3: tile_block<3>(in, group_numbers, w + n * size, size, first == 0, out, y_stride, some); break;
                default: tile_block<4>(in, group_numbers, w + n * size, size, first == 0, out, y_stride, some);
            }
        }
    }
}

#else

static inline bool tiles_usable() { return false; }

struct TileScope {};

#endif

}  // namespace distserve

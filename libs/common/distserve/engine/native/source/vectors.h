// Sixteen floats at a time, in the compilers' portable vector extension (GCC and Clang): the compiler splits them where
// registers are narrower. Intrinsics only where the extension can't say it: pairs of bfloat16 products (AVX512-BF16).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace distserve {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

#if defined(__FLT16_MAX__)
typedef _Float16 f16;
#define DISTSERVE_HAS_F16 1
typedef _Float16 f16x16 __attribute__((vector_size(32)));
#endif

template <class V>
static inline V load_vector(const void* from) {
    V found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline f32x16 broadcast(float value) { return value - f32x16{}; }

// ------------------------------------------------------------------ sixteen numbers of a dtype, as float and back

static inline f32x16 widen(const float* from) { return load_vector<f32x16>(from); }

static inline f32x16 widen(const bf16* from) {
    const u32x16 bits = __builtin_convertvector(load_vector<u16x16>(from), u32x16) << 16;
    return (f32x16)bits;
}

static inline void narrow(float* to, f32x16 value) { memcpy(to, &value, sizeof value); }

// The bits of the nearest bfloat16 (ties to even), zeros behind; a NaN stays one.
static inline u32x16 nearest_bf16(f32x16 value) {
    const u32x16 bits = (u32x16)value;
    const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    const u32x16 is_nan = (u32x16)(value != value);
    return (rounded & ~is_nan) | (0x7fc00000 & is_nan);
}

static inline void narrow(bf16* to, f32x16 value) {
    const u16x16 done = __builtin_convertvector(nearest_bf16(value) >> 16, u16x16);
    memcpy(to, &done, sizeof done);
}

#if DISTSERVE_HAS_F16
static inline f32x16 widen(const f16* from) { return __builtin_convertvector(load_vector<f16x16>(from), f32x16); }

static inline void narrow(f16* to, f32x16 value) {
    const f16x16 done = __builtin_convertvector(value, f16x16);
    memcpy(to, &done, sizeof done);
}
#endif

// The value as it is after being stored as a T: what a model computed in T sees.
template <class T>
static inline f32x16 rounded(f32x16 value) {
    T stored[LANES];
    narrow(stored, value);
    return widen(stored);
}

template <>
inline f32x16 rounded<float>(f32x16 value) {
    return value;
}

// The first `count` (below 16) of them, zeros behind.
template <class T>
static inline f32x16 widen_part(const T* from, int count) {
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    return widen(padded);
}

template <class T>
static inline void narrow_part(T* to, f32x16 value, int count) {
    T all[LANES];
    narrow(all, value);
    memcpy(to, all, count * sizeof(T));
}

// ------------------------------------------------------------------ sums, maxima, exp

template <int... I>
static inline f32x16 pick(f32x16 a, f32x16 b) {
    return __builtin_shufflevector(a, b, I...);
}

// Lane i of the result is the sum of all lanes of part[i]: five instructions a vector instead of a dozen.
static inline f32x16 sum_each(f32x16 part[16]) {
    f32x16 eight[8], four[4], two[2];
    for (int i = 0; i < 8; i++) {
        const f32x16 a = part[i], b = part[i + 8];
        eight[i] = pick<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b) +
                   pick<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b);
    }
    for (int i = 0; i < 4; i++) {
        const f32x16 a = eight[i], b = eight[i + 4];
        four[i] = pick<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(a, b) +
                  pick<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>(a, b);
    }
    for (int i = 0; i < 2; i++) {
        const f32x16 a = four[i], b = four[i + 2];
        two[i] = pick<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b) +
                 pick<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
    }
    return pick<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(two[0], two[1]) +
           pick<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(two[0], two[1]);
}

static inline float sum(f32x16 v) {
    v += pick<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v);
    v += pick<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(v, v);
    return (v[0] + v[1]) + (v[2] + v[3]);
}

static inline f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

static inline float maximum(f32x16 v) {
    v = larger(v, pick<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v));
    v = larger(v, pick<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(v, v));
    v = larger(v, pick<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(v, v));
    return v[0] > v[1] ? v[0] : v[1];
}

// e^x within 2 ulp, 0 below -87, for x up to 88 (above: what 88 gives). x = n ln 2 + r; a polynomial in r of degree 6
// (Taylor's, |r| <= ln 2 / 2), scaled by 2^n through the exponent's bits.
static inline f32x16 exponential(f32x16 x) {
    const f32x16 highest = broadcast(88.0f), lowest = broadcast(-87.0f);
    const i32x16 vanishes = x < lowest;
    x = x > highest ? highest : x;
    x = x < lowest ? lowest : x;
    const f32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 shifted = x * 1.44269504f + magic;
    const f32x16 n = shifted - magic;
    f32x16 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;  // ln 2 in two parts
    f32x16 p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const i32x16 power = (((i32x16)shifted - (i32x16)magic) + 127) << 23;
    return vanishes ? f32x16{} : p * (f32x16)power;
}

// ------------------------------------------------------------------ products summed: what a dot product is made of

// Dot<T>: STEP numbers of two rows are multiplied and added to sixteen partial sums.
template <class T>
struct Dot {
    static constexpr int STEP = 16;
    typedef f32x16 Piece;
    static inline Piece load(const T* from) { return widen(from); }
    static inline Piece load_part(const T* from, int count) { return widen_part(from, count); }
    static inline f32x16 add(f32x16 sums, Piece a, Piece b) { return sums + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    static constexpr int STEP = 32;
    typedef __m512bh Piece;
    static inline Piece load(const bf16* from) { return load_vector<Piece>(from); }
    static inline Piece load_part(const bf16* from, int count) {
        bf16 padded[STEP] = {};
        memcpy(padded, from, count * sizeof(bf16));
        return load(padded);
    }
    static inline f32x16 add(f32x16 sums, Piece a, Piece b) { return (f32x16)_mm512_dpbf16_ps((__m512)sums, a, b); }
};
#endif

}  // namespace distserve

// Products with quantised weights: how they are packed, how inputs become integers.

#pragma once

#include "vectors.h"

namespace {

constexpr int GROUP = 32;          // inputs that share a scale
constexpr int PAIRS = GROUP / 2;   // units of two 16-bit integers in a group

enum Form : i64 { UNITS, NIBBLES, BYTES, W8A8 };

// acc += w . x, pairs of 16-bit integers; `w` is not negative.
INLINE vi dot_pairs(vi acc, vu w, vu x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return acc + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    return acc + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
    return acc + (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    return acc + (vi)(w & 0xffffu) * ((vi)(x << 16) >> 16) + (vi)(w >> 16) * ((vi)x >> 16);
#endif
}

// Units of four 8-bit integers, of weights stored with 128 added, and of input. What is summed are 32-bit integers.
struct Octets {
#if defined(__AVX512VNNI__)
    static constexpr int halves = 1;
    static INLINE vu half(vu w, int) { return w; }
    static INLINE vu half(const u32& x, int) { return vu{} + x; }
    static INLINE vf dot(vf acc, vu w, vu x) {
        return (vf)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
    }
#else
    static constexpr int halves = 2;
    static INLINE vu half(vu w, int odd) { return (odd ? w >> 8 : w) & 0x00ff00ffu; }
    static INLINE vu half(const u32& x, int odd) {
        typedef std::int16_t words __attribute__((vector_size(W * 4)));
        const words all = (words)spread(x);
        return (vu)((odd ? all : all << 8) >> 8);
    }
    static INLINE vf dot(vf acc, vu w, vu x) { return (vf)dot_pairs((vi)acc, w, x); }
#endif
};

// W half precision numbers.
INLINE vf halves(const u8* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(load<__m128i>(from));
#else
    const vu bits = __builtin_convertvector(load<vh>(from), vu);
    const vf size = (vf)((bits & 0x7fffu) << 13) * 0x1p112f;
    return (vf)((vu)size | (bits & 0x8000u) << 16);
#endif
}

// A group of 32 inputs of one panel: a scale of half precision for each column, perhaps an offset, then words,
// [words][PANEL], each of one column and `parts` pairs of neighbouring inputs.
struct Nibbles {  // offset + scale * (0 .. 15)
    static constexpr int parts = 4, words = PAIRS / parts;
    static constexpr bool offset = true;
    static constexpr int weights = 4 * PANEL, bytes = weights + 4 * words * PANEL;
    static INLINE vu part(vu word, int p) {
        const vw moved = (vw)word >> (u16)(4 * p);
        return p == 3 ? (vu)moved : (vu)moved & 0x000f000fu;
    }
    // What the words hold: the weights of a column, 8 to each, pairs 4 bits apart.
    static u32 word(const u8* q) {
        u32 all = 0;
        for (int p = 0; p < parts; p++) all |= (q[2 * p] | (u32)q[2 * p + 1] << 16) << 4 * p;
        return all;
    }
};
struct Bytes {  // scale * (-128 .. 127), stored with 128 added, which sums of input take back
    static constexpr int parts = 2, words = PAIRS / parts;
    static constexpr bool offset = false;
    static constexpr int weights = 2 * PANEL, bytes = weights + 4 * words * PANEL;
    static INLINE vu part(vu word, int p) {
        return p ? (vu)((vw)word >> (u16)8) : word & 0x00ff00ffu;
    }
    static u32 word(const u8* q) {
        return q[0] | (u32)q[1] << 16 | (u32)q[2] << 8 | (u32)q[3] << 24;
    }
};

// Rows of input as integers. Of each row and group, the sum of its integers as Q needs it: a float32 that an
// offset is multiplied by, or what its scaled products begin with. (Of W8A8 a row has one sum.)
struct Integers {
    const u32* pairs;  // [rows][stride]
    const u32* sums;   // [rows][stride / PAIRS]
    size_t stride;
};

// Lane i of what comes is lane i ^ HALF.
template <int HALF> INLINE vf partners(vf v) {
#if defined(__clang__)
    vf out;
    for (int i = 0; i < W; i++) out[i] = v[i ^ HALF];
    return out;
#else
    return __builtin_shuffle(v, lanes() ^ HALF);
#endif
}

// Hadamard's transform of TURNED numbers, in place, 8 times as long as they are. It spreads what sticks out, so
// that 8 bits resolve the rest; the weights have been turned likewise (Ashkboos et al., "QuaRot", 2024).
constexpr int TURNED = 64;
INLINE void turn(float* x) {
    constexpr int N = TURNED / W;
    vf v[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) v[i] = load<vf>(x + i * W);
    const auto inside = [&](auto half) __attribute__((always_inline)) {
        constexpr int HALF = decltype(half)::value;
        const vu minus = (vu)((lanes() & HALF) != 0) << 31;
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) v[i] = partners<HALF>(v[i]) + (vf)((vu)v[i] ^ minus);
    };
    inside(Number<1>{}), inside(Number<2>{});
    if constexpr (W > 4) inside(Number<4>{});
    if constexpr (W > 8) inside(Number<8>{});
#pragma GCC unroll 4
    for (int half = 1; half < N; half *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < N; i++)
            if (!(i & half)) {
                const vf a = v[i], b = v[i + half];
                v[i] = a + b, v[i + half] = a - b;
            }
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) store(x + i * W, v[i]);
}

// What an integer is worth when the greatest of n numbers becomes `most`. NaN when one is not finite, because
// infinity and NaN have the greatest bits: so are all products then.
float worth_of(const float* x, size_t n, float most) {
    vi greatest = {};
    for (size_t i = 0; i < n; i += W) {
        const vi size = (vi)(load<vu>(x + i) & 0x7fffffffu);
        greatest = size > greatest ? size : greatest;
    }
    i32 bits = 0;
    for (int i = 0; i < W; i++) bits = std::max(bits, greatest[i]);
    const float peak = as_float((u32)bits);
    return peak / most + peak * 0.0f;
}

INLINE vi nearest(vf x) { return (vi)(x + 12582912.0f) - 0x4b400000; }

INLINE i32 sum(vi v) {
    i32 all = 0;
    for (int i = 0; i < W; i++) all += v[i];
    return all;
}

// Inputs of a row of n as they are padded.
size_t padded_inputs(size_t n, i64 form) { return padded(n, form == W8A8 ? TURNED : GROUP); }

// Writes a row of n numbers, padded with 0, as integers of 16 bits; returns what one is worth.
float to_integers(const float* x, size_t n, bool as_offset, u32* pairs, u32* sums) {
    const float worth = worth_of(x, n, 32767.0f), factor = worth > 0 ? 1.0f / worth : 0.0f;
    for (size_t group = 0; group * GROUP < n; group++) {
        vi total = {};
        for (size_t i = group * GROUP; i < (group + 1) * GROUP; i += W) {
            const vi whole = nearest(load<vf>(x + i) * factor);
            total += whole;
            store(reinterpret_cast<u16*>(pairs) + i, __builtin_convertvector(whole, vs));
        }
        const i32 all = sum(total);
        const float shown = (float)all;
        if (as_offset) std::memcpy(sums + group, &shown, 4);
        else sums[group] = (u32)(-128 * all);
    }
    return worth;
}

// The same with 8 bits and one sum, after it has turned them.
float to_octets(float* x, size_t n, u32* octets, u32* sums) {
    for (size_t i = 0; i < n; i += TURNED) turn(x + i);
    const float worth = worth_of(x, n, 127.0f), factor = worth > 0 ? 1.0f / worth : 0.0f;
    vi total = {};
    for (size_t i = 0; i < n; i += W) {
        const vi whole = nearest(load<vf>(x + i) * factor);
        total += whole;
        store(reinterpret_cast<u8*>(octets) + i, __builtin_convertvector(whole, vb));
    }
    sums[0] = (u32)(-128 * sum(total));
    return worth;
}

// totals[r][v] += one group's product. `Weights` gives unit i of vector v, and scale and offset of vector v.
template <class Q, int R, class Weights>
INLINE void add_group(float* totals, const Weights& weights, const Integers& x, size_t group) {
    const size_t stride = x.stride, each = stride / PAIRS;
    const u32 *pairs = x.pairs + group * PAIRS, *sums = x.sums + group;
    vi acc[R][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[r][v] = Q::offset ? vi{} : vi{} + (i32)sums[r * each];
    weights.each([&](int v, int i, vu part) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            acc[r][v] = dot_pairs(acc[r][v], part, vu{} + pairs[r * stride + i]);
    });
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        const vf scale = weights.scale(v), offset = Q::offset ? weights.offset(v) : vf{};
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            float* at = totals + r * PANEL + v * W;
            vf total = load<vf>(at) + __builtin_convertvector(acc[r][v], vf) * scale;
            if (Q::offset) total += offset * as_float(sums[r * each]);
            store(at, total);
        }
    }
}

// A group as it is stored.
template <class Q> struct Stored {
    const u8* at;
    template <class F> INLINE void each(const F& f) const {
#pragma GCC unroll 1
        for (int word = 0; word < Q::words; word++) {
            const u8* from = at + Q::weights + word * PANEL * 4;
            vu words[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                __builtin_prefetch(from + v * W * 4 + FETCHED);
                words[v] = load<vu>(from + v * W * 4);
            }
#pragma GCC unroll 4
            for (int p = 0; p < Q::parts; p++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) f(v, word * Q::parts + p, Q::part(words[v], p));
        }
    }
    INLINE vf scale(int v) const { return halves(at + v * W * 2); }
    INLINE vf offset(int v) const { return halves(at + (PANEL + v * W) * 2); }
};

// The same, unpacked once for many rows.
template <class Q> struct Unpacked {
    alignas(64) u32 units[PAIRS][PANEL];
    alignas(64) float scales[PANEL], offsets[PANEL];

    INLINE void take(const u8* at) {
#pragma GCC unroll 1
        for (int word = 0; word < Q::words; word++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const u8* from = at + Q::weights + (word * PANEL + v * W) * 4;
                __builtin_prefetch(from + FETCHED);
                const vu all = load<vu>(from);
#pragma GCC unroll 4
                for (int p = 0; p < Q::parts; p++) store(units[word * Q::parts + p] + v * W, Q::part(all, p));
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            store(scales + v * W, halves(at + v * W * 2));
            if (Q::offset) store(offsets + v * W, halves(at + (PANEL + v * W) * 2));
        }
    }
};
template <class Q> struct Ready {
    const Unpacked<Q>& from;
    template <class F> INLINE void each(const F& f) const {
#pragma GCC unroll 1
        for (int i = 0; i < PAIRS; i++) {
            vu part[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) part[v] = load<vu>(from.units[i] + v * W);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) f(v, i, part[v]);
        }
    }
    INLINE vf scale(int v) const { return load<vf>(from.scales + v * W); }
    INLINE vf offset(int v) const { return load<vf>(from.offsets + v * W); }
};

// Unpacking leaves memory so much time that a few lines at once do not matter.
template <class Later> INLINE void fetch_beside_group(Later& later) {
    constexpr size_t MOST = 8;
    const Lines lines = later.take(MOST);
    for (size_t i = 0; i < lines.count; i++) fetch(lines.from + i * LINE);
}

// totals[r][v] += all groups of a panel, unpacked on the way: for few rows.
template <class Q, int R, class Later>
void add_stored(float* totals, const u8* w, const Integers& x, size_t groups, Later& later) {
    for (size_t g = 0; g < groups; g++) {
        if (R > STREAMED) fetch_beside_group(later);
        add_group<Q, R>(totals, Stored<Q>{w + g * Q::bytes}, x, g);
    }
}

template <class Q, int R, class Later>
void add_unpacked(float* totals, const Unpacked<Q>& w, const Integers& x, size_t group, Later& later) {
    fetch_beside_group(later);
    add_group<Q, R>(totals, Ready<Q>{w}, x, group);
}

// Splits `count` into tiles of at most ROWS, as even as can be, and calls f(first, rows).
template <class F> INLINE void tiles_of(size_t count, const F& f) {
    const size_t tiles = (count + ROWS - 1) / ROWS;
    for (size_t i = 0; i < tiles; i++) {
        const size_t first = count * i / tiles;
        f(first, (int)(count * (i + 1) / tiles - first));
    }
}

}  // namespace

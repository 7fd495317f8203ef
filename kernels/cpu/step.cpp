// One step of a Llama-family decoder over a paged KV cache, as one call: block copies, embedding, all
// layers, last norm, output projection, choice of tokens. Prompts, chunks and single tokens share one path.
//
// A *unit* is 32 bits: two bfloat16 numbers of neighbouring rows of a product's inner dimension, or one
// float32. Every product here is then the same loop: acc[row][lane] += unit of weights . unit of input.
// Weights are packed once into panels of 2 vectors of columns, [panel][inner / per][2 * W] units. K and V of
// one block and one KV head form a tile: K as [head_dim / per][block_size] units, so that one vector holds a
// score of W keys, then V as [block_size / per][head_dim] units. One layer's tiles are [block][kv_head][K, V].
//
// Quantised weights stay as small as their file has them and are multiplied exactly: 4 or 8 bits of weight by
// 16 of input, summed as integers over groups of 32 inputs, each group's sum then scaled in float32. Rounding an
// input row to 16 bits costs less than rounding it to bfloat16 does. Or, as W8A8, 8 bits of both, with one scale for
// an output and one for a row of input: half the work, for other texts.
//
// Every token's numbers are computed in the same order whatever stands beside it in the batch, so a text does
// not depend on its company. No -ffast-math: NaN and infinity must reach the caller, who fails that row.
// A slot that was never written may hold NaN, and 0 * NaN is NaN: such slots are left out, not weighted by 0.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using std::size_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// ---------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
// Rows of a tile of accumulators, which must fit the registers beside a panel's vectors of weights. Tall tiles
// rather than wide ones, because up to so many rows read each weight once, and memory is never left idle.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif
constexpr int VECTORS = 2;
constexpr int PANEL = VECTORS * W;
constexpr int MOST_HEAD = 256;
constexpr int LINE = 16;  // units of a cache line
constexpr int AHEAD = 3;  // blocks of K and V fetched before they are needed
constexpr int FETCHED = 2048;  // bytes of quantised weights fetched before they are needed

typedef float vf __attribute__((vector_size(W * 4)));
typedef u32 vu __attribute__((vector_size(W * 4)));
typedef i32 vi __attribute__((vector_size(W * 4)));
typedef u16 vh __attribute__((vector_size(W * 2)));
typedef u16 vw __attribute__((vector_size(W * 4)));
typedef std::int16_t vs __attribute__((vector_size(W * 2)));
typedef std::int8_t vb __attribute__((vector_size(W)));

#define INLINE inline __attribute__((always_inline))
#define PUBLIC __attribute__((visibility("default")))

template <class V> INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> INLINE void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE float as_float(u32 bits) { return load<float>(&bits); }

size_t padded(size_t n, size_t to) { return (n + to - 1) / to * to; }

INLINE vi lanes() {
    vi v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

INLINE float sum(vf v) {
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

// e^x to about 1e-7, 0 and infinity rounded to the least and most normal numbers; NaN stays NaN.
INLINE vf exponential(vf x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const vf shifted = x * 1.44269504f + 12582912.0f;  // rounds to a whole number in the low bits
    const vf whole = shifted - 12582912.0f;
    const vf r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vf)(((vu)shifted + 127u) << 23);
}

// ---------------------------------------------------------------- the two kinds of unit

struct Bf16 {
    static constexpr int per = 2;

    static INLINE vf dot(vf acc, vu w, u32 x) {
#if defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
        acc += (vf)(w << 16) * splat(as_float(x << 16));
        return acc + (vf)(w & 0xffff0000u) * splat(as_float(x & 0xffff0000u));
#endif
    }

    static INLINE void put(u32* base, size_t index, vf x) {
        u16* to = reinterpret_cast<u16*>(base) + index;
#if defined(__AVX512BF16__)
        store(to, _mm512_cvtneps_pbh((__m512)x));
#else
        const vu bits = (vu)x;
        const vu nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        store(to, __builtin_convertvector(x != x ? vu{} + 0x7fc0u : nearest, vh));
#endif
    }
    static INLINE float get(const void* base, size_t index) {
        return as_float((u32)static_cast<const u16*>(base)[index] << 16);
    }
};

struct F32 {
    static constexpr int per = 1;
    static INLINE vf dot(vf acc, vu w, u32 x) { return acc + (vf)w * splat(as_float(x)); }
    static INLINE void put(u32* base, size_t index, vf x) { store(base + index, x); }
    static INLINE float get(const void* base, size_t index) {
        return static_cast<const float*>(base)[index];
    }
};

// Into the second level of cache: far fewer lines can be on their way into the first.
INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// acc[r][v] += w[i][v] . x[r][i] for i below n. Of `next`, what is read later, LINES lines are fetched with each i,
// `apart` units apart.
template <class T, int LINES, int R, int NV>
INLINE void accumulate(vf (&acc)[R][NV], const u32* w, size_t step, const u32* x, size_t ldx, size_t n,
                       const u32* next, size_t apart) {
    constexpr int EACH = 4, PARTS = (R + EACH - 1) / EACH;  // rows reached from one address by registers' multiples
    const u32* from[PARTS];
#pragma GCC unroll 3
    for (int p = 0; p < PARTS; p++) from[p] = x + p * EACH * ldx;
    for (size_t i = 0; i < n; i++, w += step) {
        vu part[NV];
        if (next)
#pragma GCC unroll 4
            for (int line = 0; line < LINES; line++) fetch(next + i * apart + line * LINE);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) part[v] = load<vu>(w + v * W);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] = T::dot(acc[r][v], part[v], from[r / EACH][r % EACH * ldx + i]);
    }
}

// out[r] = sum over i of w[i] . x[r][i], of one panel w. Of `next` what the first `fetched` i of a panel
// take is fetched on the way.
template <class T, int R>
void product(const u32* w, const u32* x, size_t ldx, size_t n, float* out, const u32* next, size_t fetched) {
    constexpr int LINES = (PANEL + LINE - 1) / LINE;
    vf acc[R][VECTORS] = {};
    accumulate<T, LINES>(acc, w, PANEL, x, ldx, fetched, next, PANEL);
    accumulate<T, 0>(acc, w + fetched * PANEL, PANEL, x + fetched, ldx, n - fetched, nullptr, 0);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(out + r * PANEL + v * W, acc[r][v]);
}

// Scores of the keys of two vectors of K at once: out[i][r] = sum over d of keys[i][d] . q[r][d].
template <class T, int R>
void score(const u32* const (&keys)[2], size_t step, const u32* q, size_t n, float* const (&out)[2], size_t ldo,
           const std::ptrdiff_t (&ahead)[2]) {
    vf acc[R][2] = {};
    for (size_t d = 0; d < n; d++) {
        const u32 *a = keys[0] + d * step, *b = keys[1] + d * step;
        fetch(a + ahead[0]);
        fetch(b + ahead[1]);
        const vu part[2] = {load<vu>(a), load<vu>(b)};
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            acc[r][0] = T::dot(acc[r][0], part[0], q[r * n + d]);
            acc[r][1] = T::dot(acc[r][1], part[1], q[r * n + d]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        store(out[0] + r * ldo, acc[r][0]);
        store(out[1] + r * ldo, acc[r][1]);
    }
}

// The V tiles of consecutive blocks and which of their keys count, both ends relative to the first block.
struct Values {
    const u32* const* tiles;
    int from, to, block_size, head_dim;
};

// out[r][v] = sum over keys of p[r][key] * V[key][v], in units of keys.
template <class T, int R, int NV>
void weigh(const Values& values, int dim, const u32* p, size_t ldp, float* out, size_t ldo) {
    vf acc[R][NV] = {};
    const int size = values.block_size, head = values.head_dim;
    for (int block = values.from / size; block * size < values.to; block++) {
        const u32* tile = values.tiles[block] + dim;
        const u32* weights = p + (size_t)block * size / T::per;
        int from = values.from - block * size, to = values.to - block * size;
        from = from < 0 ? 0 : from;
        to = to > size ? size : to;
        const bool more = (block + AHEAD) * size < values.to;
        const u32* next = more ? values.tiles[block + AHEAD] + dim : nullptr;
        const auto single = [&](int unit, u32 mask) {  // one key of a pair whose other one does not count
            for (int v = 0; v < NV; v++) {
                const vu kept = load<vu>(tile + (size_t)unit * head + v * W) & mask;
                for (int r = 0; r < R; r++) acc[r][v] = T::dot(acc[r][v], kept, weights[r * ldp + unit]);
            }
        };
        if (T::per == 2 && from % 2) single(from++ / 2, 0xffff0000u);
        constexpr int LINES = (NV * W + LINE - 1) / LINE;
        accumulate<T, LINES>(acc, tile + (size_t)(from / T::per) * head, head, weights + from / T::per, ldp,
                             to / T::per - from / T::per, next, head);
        if (T::per == 2 && to % 2) single(to / 2, 0x0000ffffu);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(out + r * ldo + v * W, acc[r][v]);
}

template <int N> struct Number {
    static constexpr int value = N;
};

// Calls f with `n`, 1 to MOST, as a constant.
template <int MOST, class F> INLINE void with_number(int n, const F& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        ((n == I + 1 ? f(Number<I + 1>{}) : void()), ...);
    }(std::make_integer_sequence<int, MOST>{});
}
template <class F> INLINE void with_rows(int rows, const F& f) { with_number<ROWS>(rows, f); }

// ---------------------------------------------------------------- quantised weights

constexpr int GROUP = 32;          // inputs that share a scale
constexpr int PAIRS = GROUP / 2;   // units of two 16-bit integers in a group

enum Form : i64 { UNITS, NIBBLES, BYTES, W8A8 };

// acc += w . x, pairs of 16-bit integers; `w` is not negative.
INLINE vi dot_pairs(vi acc, vu w, u32 x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32((int)x));
#elif defined(__AVX512BW__)
    return acc + (vi)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32((int)x));
#elif defined(__AVX2__)
    return acc + (vi)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32((int)x));
#elif defined(__SSE2__)
    return acc + (vi)_mm_madd_epi16((__m128i)w, _mm_set1_epi32((int)x));
#else
    return acc + (vi)(w & 0xffffu) * (i32)(std::int16_t)x + (vi)(w >> 16) * ((i32)x >> 16);
#endif
}

// Units of four 8-bit integers, of weights stored with 128 added, and of input. What is summed are 32-bit integers.
struct Octets {
    static INLINE vf dot(vf acc, vu w, u32 x) {
#if defined(__AVX512VNNI__)
        return (vf)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32((int)x));
#else
        const auto pair = [](u32 q) { return (u16)(std::int8_t)q | (u32)(u16)(std::int8_t)(q >> 16) << 16; };
        const vi even = dot_pairs((vi)acc, w & 0x00ff00ffu, pair(x));
        return (vf)dot_pairs(even, (w >> 8) & 0x00ff00ffu, pair(x >> 8));
#endif
    }
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
            acc[r][v] = dot_pairs(acc[r][v], part, pairs[r * stride + i]);
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

// totals[r][v] += all groups of a panel, unpacked on the way: for few rows.
template <class Q, int R>
void add_stored(float* totals, const u8* w, const Integers& x, size_t groups) {
    for (size_t g = 0; g < groups; g++) add_group<Q, R>(totals, Stored<Q>{w + g * Q::bytes}, x, g);
}

template <class Q, int R>
void add_unpacked(float* totals, const Unpacked<Q>& w, const Integers& x, size_t group) {
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

#include "draw.h"

// ---------------------------------------------------------------- the interface; native.py mirrors it

extern "C" {

struct Linear {
    const u8* weight;     // packed
    const float* bias;    // in packed order, padded to whole panels; or null
    const float* scales;  // likewise, of W8A8
    i64 form;             // of `weight`
};

struct Layer {
    const float *input_norm, *post_norm;  // [hidden], padded to a panel with 0
    const float *query_norm, *key_norm;   // [head_dim], or null
    Linear qkv, output, gate_up, down;
    i64 window;   // positions a token sees, itself included; 0: all before it
    i64 rotated;  // whether the layer has a rotary embedding
};

struct Model {
    i64 wide;  // 1: float32 units, 0: bfloat16
    i64 hidden, intermediate, vocab, layers, heads, kv_heads, head_dim;
    i64 block_size, blocks, threads;
    double epsilon, scale;
    i64 embedding_form;     // UNITS or BYTES
    const void* embedding;  // [vocab][hidden], row after row; of BYTES a half and 32 integers a group
    const float* norm;      // as input_norm
    Linear head;
    const Layer* layer;
    u32* kv;  // [layers][blocks][kv_heads] tiles
};

struct Step {
    i64 tokens, rows, outputs, copies;
    const i32* ids;                  // [tokens]
    const i32 *starts, *counts;      // [rows]
    const i32* const* tables;        // [rows], block ids
    const i32* copied;               // [copies][2]: source, target
    const i32* sampled;              // [outputs], rising indices of tokens
    const float *cosines, *sines;    // [positions][head_dim / 2]
    const i32* kept;                 // [outputs]: row of `logits` each one fills, -1: none
    float* logits;                   // [rows of kept][vocab]
    i32* best;                       // [outputs]: likeliest token, -1 if a logit is not finite
    i64 draws;
    const Draw* drawn;               // [draws], from rows of `logits`
    i32* picked;                     // [draws]
};
}

namespace {

// ---------------------------------------------------------------- threads

void relax(int spins) {
    if (spins >= 100) {
        sched_yield();  // whoever we wait for may need this core
        return;
    }
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One stage of a step, in pieces that threads take as they come. It is over when its pieces are, not when all
// threads have seen it, so a thread that lost its core with no piece in hand keeps nobody waiting. Both words
// hold the step's number above a count: a thread from an earlier step finds another number and leaves. What a
// step points to may be read only with a piece in hand, for only then must the step still be going on.
class Stage {
  public:
    void open(u32 step, u32 pieces) {
        const u64 word = (u64)step << 32 | pieces;
        pending_.store(word, std::memory_order_relaxed);
        left_.store(word, std::memory_order_release);
    }

    // Calls f(pieces left behind this one) for each piece taken; returns false if the step is another one.
    template <class F> bool run(u32 step, const F& f) {
        for (u64 word = left_.load(std::memory_order_acquire);;) {
            if (word >> 32 != step) return false;
            if ((u32)word == 0) break;
            if (!left_.compare_exchange_weak(word, word - 1, std::memory_order_acquire)) continue;
            f((u32)word - 1);
            pending_.fetch_sub(1, std::memory_order_release);
            word = left_.load(std::memory_order_acquire);
        }
        for (int spins = 0;; spins++) {
            const u64 word = pending_.load(std::memory_order_acquire);
            if (word >> 32 != step) return false;
            if ((u32)word == 0) return true;
            relax(spins);
        }
    }

  private:
    alignas(64) std::atomic<u64> left_{0};
    alignas(64) std::atomic<u64> pending_{0};
};

// Memory that grows and is never copied; large ones in huge pages.
class Buffer {
  public:
    ~Buffer() { std::free(at_); }
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        std::free(at_);
        at_ = nullptr, size_ = 0;
        const size_t align = bytes < (1u << 20) ? 64 : 2u << 20;
        at_ = std::aligned_alloc(align, padded(bytes, align));
        if (!at_) throw std::bad_alloc();
        size_ = padded(bytes, align);
#if defined(MADV_HUGEPAGE)
        if (align > 64) madvise(at_, size_, MADV_HUGEPAGE);
#endif
        std::memset(at_, 0, size_);
    }
    template <class T> T* as() const { return static_cast<T*>(at_); }

  private:
    void* at_ = nullptr;
    size_t size_ = 0;
};

// Consecutive tokens of one sequence that share each load of its K and V.
struct Tile {
    i32 row, first, count, position;  // `first` in the flat batch, `position` in the sequence
};

struct Scratch {  // of one thread
    Buffer queries, scores, tiles, out, row;
    Candidates candidates;
    Buffer best;  // of each output and lane: the greatest logit, its id, and NaN once one was not finite
    vi* where(size_t outputs) const { return best.as<vi>() + outputs; }
    vf* faults(size_t outputs) const { return best.as<vf>() + 2 * outputs; }
};

// ---------------------------------------------------------------- the step

// The stages of a step: COPY and EMBED, the next eleven for each layer, the last three.
enum Kind {
    COPY, EMBED,
    NORM, QKV, PLACE, ATTEND, COMPACT, ROUND_ATTENDED, OUTPUT, POST_NORM, GATE, ROUND_GATED, DOWN,
    LAST_NORM, HEAD, DRAW
};
constexpr size_t PER_LAYER = 11, BEFORE = 2, AFTER = 3;
constexpr size_t LAST_PIECES = 9;  // stages from the last layer's ROUND_ATTENDED on

class Engine {
  public:
    explicit Engine(const Model& model)
        : m(model), layers(model.layer, model.layer + model.layers), scratch(model.threads),
          stages(BEFORE + PER_LAYER * model.layers + AFTER) {
        ld_hidden = padded(m.hidden, PANEL);
        ld_qkv = padded(qkv_columns(), PANEL);
        ld_gated = padded(gate_columns(), PANEL) / 2;
        const size_t heads = m.heads * m.head_dim, inner = m.intermediate;
        ld_integers = padded(std::max({(size_t)m.hidden, heads, inner}), TURNED) / 2;
    }

    void start() {
        for (int t = 1; t < m.threads; t++) threads.emplace_back([this, t] { serve(t); });
    }

    ~Engine() {
        stopping = true;
        wake();
        for (auto& thread : threads) thread.join();
    }

    void run(const Step& step) {
        s = step;
        prepare();
        wake();
        work(0, number.load(std::memory_order_relaxed));
        settle();
    }

  private:
    Model m;
    std::vector<Layer> layers;
    Step s{};
    std::vector<std::thread> threads;
    std::vector<Scratch> scratch;
    std::vector<Stage> stages;
    std::atomic<u32> number{0};  // of the step
    std::atomic<bool> stopping{false};

    Buffer residual, normed, projected, queries, attended, gated, positions, owners;
    Buffer integers, sums, worths;  // the input of the next product, when its weights are quantised
    std::vector<Tile> tiles;
    size_t ld_hidden, ld_qkv, ld_gated;  // padded to whole panels
    size_t ld_integers;                  // in pairs

    size_t group() const { return m.heads / m.kv_heads; }
    size_t tile_units(int per) const { return (size_t)m.head_dim * m.block_size / per; }  // of K, or of V
    size_t qkv_columns() const { return (m.heads + 2 * m.kv_heads) * m.head_dim; }
    size_t gate_columns() const { return 2 * padded(m.intermediate, W); }

    void wake() {
        number.fetch_add(1, std::memory_order_release);
        number.notify_all();
    }

    void serve(int t) {
        for (u32 seen = 0;;) {
            number.wait(seen, std::memory_order_acquire);
            if (stopping) return;
            seen = number.load(std::memory_order_acquire);
            work(t, seen);
        }
    }

    void work(int t, u32 step) { m.wide ? compute<F32>(t, step) : compute<Bf16>(t, step); }

    void prepare() {
        const size_t n = s.tokens;
        residual.reserve(n * ld_hidden * 4);
        normed.reserve(n * ld_hidden * 4);
        projected.reserve(n * ld_qkv * 4);
        queries.reserve(n * m.heads * m.head_dim * 4);
        attended.reserve(n * m.heads * m.head_dim * 4);
        gated.reserve(n * ld_gated * 4);
        integers.reserve(n * ld_integers * 4);
        sums.reserve(n * ld_integers / PAIRS * 4);
        worths.reserve(n * 4);
        positions.reserve(n * 4);
        owners.reserve(n * 4);
        tiles.clear();
        const size_t most = std::max<size_t>(1, ROWS / group());
        size_t longest = 0;
        i32 token = 0;
        for (i32 row = 0; row < s.rows; row++) {
            for (i32 i = 0; i < s.counts[row]; i++, token++) {
                positions.as<i32>()[token] = s.starts[row] + i;
                owners.as<i32>()[token] = row;
                if (i % most == 0) tiles.push_back({row, token, 0, s.starts[row] + i});
                tiles.back().count++;
            }
            longest = std::max<size_t>(longest, s.starts[row] + s.counts[row]);
        }
        const size_t rows = most * group();
        for (auto& own : scratch) {
            own.queries.reserve(rows * m.head_dim * 4);
            own.scores.reserve(rows * scores_stride(longest) * 4);
            own.tiles.reserve((longest / m.block_size + 2) * sizeof(void*) * 2);
            own.out.reserve(std::max<size_t>(rows * (m.head_dim + 1), ROWS * PANEL) * 4);
            own.row.reserve(ld_integers * 8 + PANEL * 4);
            if (s.draws) own.candidates.reserve(m.vocab);
            own.best.reserve(s.outputs * W * 12);
            for (i64 i = 0; i < s.outputs; i++)
                own.best.as<vf>()[i] = splat(-INFINITY), own.where(s.outputs)[i] = vi{},
                own.faults(s.outputs)[i] = vf{};
        }
        for (size_t i = 0; i < stages.size(); i++) stages[i].open(number + 1, (u32)pieces(i));
    }

    Kind kind(size_t stage) const {
        if (stage < BEFORE) return (Kind)stage;
        const size_t end = BEFORE + PER_LAYER * layers.size();
        return (Kind)(stage < end ? NORM + (stage - BEFORE) % PER_LAYER : LAST_NORM + (stage - end));
    }

    // Rows of a stage: behind the last layer's attention only tokens that are sampled count.
    size_t rows_of(size_t stage) const {
        return stage >= stages.size() - LAST_PIECES ? s.outputs : s.tokens;
    }

    size_t pieces(size_t stage) const {
        const size_t n = rows_of(stage), each = n < 128 ? 4 : 16, some = (n + each - 1) / each;
        switch (kind(stage)) {
            case COPY: return s.copies * m.layers;
            case EMBED: case NORM: case PLACE: case POST_NORM: case LAST_NORM: return some;
            case QKV: return shares(qkv_columns(), n);
            case ATTEND:
                return stage + LAST_PIECES + 2 == stages.size() && !s.outputs ? 0 : tiles.size() * m.kv_heads;
            case COMPACT: return stage + LAST_PIECES + 1 == stages.size() && s.outputs < s.tokens;
            case ROUND_ATTENDED: return layer_of(stage)->output.form == UNITS ? 0 : some;
            case ROUND_GATED: return layer_of(stage)->down.form == UNITS ? 0 : some;
            case OUTPUT: case DOWN: return shares(m.hidden, n);
            case GATE: return shares(gate_columns(), n);
            case HEAD: return shares(m.vocab, n);
            case DRAW: return s.draws;
        }
        return 0;
    }

    const Layer* layer_of(size_t stage) const {
        const size_t index = (stage - BEFORE) / PER_LAYER;
        return index < layers.size() ? &layers[index] : nullptr;
    }

    // The columns of a product are shared out in whole panels, one share for each thread, because a thread reads
    // weights that follow each other faster than what takes turns.
    size_t shares(size_t columns, size_t rows) const {
        return rows ? std::min<size_t>(padded(columns, PANEL) / PANEL, m.threads) : 0;
    }

    // The part of `count` that is piece `left` from the end of `pieces`.
    struct Range {
        size_t from, to;
        Range(size_t count, size_t pieces, u32 left)
            : from(count * (pieces - 1 - left) / pieces), to(count * (pieces - left) / pieces) {}
    };

    size_t scores_stride(size_t length) const { return padded(length, m.block_size) + 2 * W; }

    template <class T> void compute(int t, u32 step) {
        for (size_t i = 0; i < stages.size(); i++)
            if (!stages[i].run(step, [&](u32 left) { work_on<T>(t, i, left); })) return;
    }

    template <class T> void work_on(int t, size_t stage, u32 left) {
        const size_t n = rows_of(stage), count = pieces(stage), index = (stage - BEFORE) / PER_LAYER;
        const Range some(n, count, left);
        const Layer* layer = layer_of(stage);
        const size_t heads = m.heads * m.head_dim;
        const Scratch& own = scratch[t];
        switch (kind(stage)) {
            case COPY: return copy<T>(count - 1 - left);
            case EMBED: return embed<T>(some);
            case NORM: return normalise<T>(own, some, layer->input_norm, layer->qkv.form);
            case QKV: return project_qkv<T>(*layer, n, left);
            case PLACE: return place<T>(some, *layer, index);
            case ATTEND: {
                const size_t piece = count - 1 - left;
                return attend<T>(own, *layer, index, tiles[piece / m.kv_heads], piece % m.kv_heads);
            }
            case COMPACT: return compact<T>(layer->output.form);
            case ROUND_ATTENDED: return round(own, some, attended.as<float>(), heads, heads, layer->output.form);
            case ROUND_GATED:
                return round(own, some, gated.as<float>(), ld_gated, m.intermediate, layer->down.form);
            case OUTPUT: return add_product<T>(layer->output, attended.as<u32>(), heads, heads, n, left);
            case POST_NORM: return normalise<T>(own, some, layer->post_norm, layer->gate_up.form);
            case GATE: return gate<T>(*layer, n, left);
            case DOWN: return add_product<T>(layer->down, gated.as<u32>(), ld_gated, m.intermediate, n, left);
            case LAST_NORM: return normalise<T>(own, some, m.norm, m.head.form);
            case HEAD: return choose<T>(own, left);
            case DRAW: return draw(t, left);
        }
    }

    void draw(int t, u32 index) {
        const Draw& draw = s.drawn[index];
        s.picked[index] = scratch[t].candidates.pick(s.logits + draw.row * m.vocab, m.vocab, draw);
    }

    // Whole blocks, all layers. No target is a source, and none is a target twice.
    template <class T> void copy(size_t piece) {
        const size_t block = m.kv_heads * 2 * tile_units(T::per);
        u32* layer = m.kv + piece % m.layers * m.blocks * block;
        const i32* pair = s.copied + piece / m.layers * 2;
        std::memcpy(layer + pair[1] * block, layer + pair[0] * block, block * 4);
    }

    template <class T> void embed(Range rows) {
        for (size_t i = rows.from; i < rows.to; i++) {
            float* to = residual.as<float>() + i * ld_hidden;
            const size_t row = (size_t)s.ids[i] * m.hidden;
            if (m.embedding_form == BYTES) {
                const u8* group = static_cast<const u8*>(m.embedding) + row / GROUP * (GROUP + 2);
                for (i64 h = 0; h < m.hidden; h += GROUP, group += GROUP + 2) {
                    alignas(64) u8 copied[2 * W] = {group[0], group[1]};
                    const float scale = halves(copied)[0];
                    for (int j = 0; j < GROUP; j++) to[h + j] = scale * (float)(std::int8_t)group[2 + j];
                }
            } else {
                for (i64 h = 0; h < m.hidden; h++) to[h] = T::get(m.embedding, row + h);
            }
            for (size_t h = m.hidden; h < ld_hidden; h++) to[h] = 0;
        }
    }

    // Root mean square norm of rows of the residual stream.
    template <class T> void normalise(const Scratch& own, Range rows, const float* weight, i64 form) {
        for (size_t i = rows.from; i < rows.to; i++) {
            const float* x = residual.as<float>() + i * ld_hidden;
            u32* to = normed.as<u32>() + i * ld_hidden / T::per;
            const float factor = inverse_rms(x, ld_hidden, m.hidden);
            if (form == UNITS) {
                for (size_t h = 0; h < ld_hidden; h += W)
                    T::put(to, h, load<vf>(x + h) * factor * load<vf>(weight + h));
                continue;
            }
            float* row = own.row.as<float>();
            for (size_t h = 0; h < ld_hidden; h += W)
                store(row + h, load<vf>(x + h) * factor * load<vf>(weight + h));
            keep_integers(i, row, m.hidden, form);
        }
    }

    // Rows of input as integers, for quantised weights.
    void round(const Scratch& own, Range rows, const float* x, size_t ldx, size_t n, i64 form) {
        float* row = own.row.as<float>();
        for (size_t i = rows.from; i < rows.to; i++) {
            std::memcpy(row, x + i * ldx, n * 4);
            keep_integers(i, row, n, form);
        }
    }

    // `x` has room for padding.
    void keep_integers(size_t row, float* x, size_t n, i64 form) {
        const size_t all = padded_inputs(n, form);
        for (size_t i = n; i < all; i++) x[i] = 0;
        u32 *to = integers.as<u32>() + row * ld_integers, *own = sums.as<u32>() + row * (ld_integers / PAIRS);
        worths.as<float>()[row] = form == W8A8 ? to_octets(x, all, to, own)
                                               : to_integers(x, all, form == NIBBLES, to, own);
    }

    float inverse_rms(const float* x, size_t n, size_t count) const {
        vf squares = {};
        for (size_t i = 0; i < n; i += W) squares += load<vf>(x + i) * load<vf>(x + i);
        return 1.0f / std::sqrt(sum(squares) / (float)count + (float)m.epsilon);
    }

    // store_tile(row, first column, values of a panel) for one share of the columns of x . weight. Quantised weights
    // take what `integers` holds instead of x.
    template <class T, class Store>
    void multiply(u32 left, const Linear& linear, size_t inner, size_t columns, const u32* x, size_t ldx,
                  size_t rows, const Store& store_tile) {
        if constexpr (T::per == 2) {
            if (linear.form == W8A8) return multiply_octets(left, linear, inner, columns, rows, store_tile);
            if (linear.form != UNITS) return multiply_quantised(left, linear, inner, columns, rows, store_tile);
        }
        multiply_units<T>(left, linear, inner / T::per, columns, x, ldx, rows, store_tile);
    }

    template <class Store>
    void multiply_octets(u32 left, const Linear& linear, size_t inner, size_t columns, size_t rows,
                         const Store& store_tile) {
        multiply_units<Octets>(
            left, linear, padded_inputs(inner, W8A8) / 4, columns, integers.as<u32>(), ld_integers, rows,
            [&](size_t row, size_t column, float* values) {
                const i32 begin = sums.as<i32>()[row * (ld_integers / PAIRS)];
                const float worth = worths.as<float>()[row];
                for (int v = 0; v < PANEL; v += W)
                    store(values + v, __builtin_convertvector(load<vi>(values + v) + begin, vf) *
                                          (load<vf>(linear.scales + column + v) * worth));
                store_tile(row, column, values);
            });
    }

    // Of units as T has them, k of them in a row.
    template <class T, class Store>
    void multiply_units(u32 left, const Linear& linear, size_t k, size_t columns, const u32* x, size_t ldx,
                        size_t rows, const Store& store_tile) {
        const u32* weight = reinterpret_cast<const u32*>(linear.weight);
        constexpr size_t FEW = 4;  // rows that the hardware fetches weights for as fast as memory can
        constexpr size_t SOME = 240;  // rows whose input stays in the cache beside a panel of weights
        const Range panels(padded(columns, PANEL) / PANEL, shares(columns, rows), left);
        alignas(64) float out[ROWS * PANEL];
        for (size_t base = 0; base < rows; base += SOME) {
            const size_t part = std::min(SOME, rows - base);
            const bool fetches = part > FEW;  // of the next panel, each tile of rows its share
            for (size_t panel = panels.from; panel < panels.to; panel++) {
                const u32* w = weight + panel * PANEL * k;
                tiles_of(part, [&](size_t first, int count) {
                    const size_t row = base + first;
                    const size_t begin = fetches ? k * first / part : 0, end = fetches ? k * (first + count) / part : 0;
                    with_rows(count, [&](auto R) {
                        product<T, R.value>(w, x + row * ldx, ldx, k, out, w + (k + begin) * PANEL, end - begin);
                    });
                    for (int r = 0; r < count; r++) store_tile(row + r, panel * PANEL, out + r * PANEL);
                });
            }
        }
    }

    template <class Store>
    void multiply_quantised(u32 left, const Linear& linear, size_t inner, size_t columns, size_t rows,
                            const Store& store_tile) {
        constexpr size_t SOME = 240;  // rows whose sums stay in the cache
        const size_t groups = (inner + GROUP - 1) / GROUP, parts = (rows + SOME - 1) / SOME;
        const Range panels(padded(columns, PANEL) / PANEL, shares(columns, rows), left);
        alignas(64) float out[SOME * PANEL];
        for (size_t panel = panels.from; panel < panels.to; panel++)
            for (size_t p = 0; p < parts; p++) {
                const size_t base = rows * p / parts, part = rows * (p + 1) / parts - base;
                if (linear.form == NIBBLES) multiply_panel<Nibbles>(linear.weight, panel, groups, base, part, out);
                else multiply_panel<Bytes>(linear.weight, panel, groups, base, part, out);
                for (size_t r = 0; r < part; r++) {
                    float* own = out + r * PANEL;
                    for (int v = 0; v < PANEL; v += W)
                        store(own + v, load<vf>(own + v) * worths.as<float>()[base + r]);
                    store_tile(base + r, panel * PANEL, own);
                }
            }
    }

    // out[row][v], in parts of what the row's integers are worth.
    template <class Q>
    void multiply_panel(const u8* weight, size_t index, size_t groups, size_t base, size_t rows, float* out) const {
        constexpr size_t FEW = 2 * ROWS;  // rows for which unpacking once and for all does not pay
        const u8* panel = weight + index * groups * Q::bytes;
        const auto input = [&](size_t first) {
            const size_t row = base + first;
            return Integers{integers.as<u32>() + row * ld_integers, sums.as<u32>() + row * (ld_integers / PAIRS),
                            ld_integers};
        };
        std::memset(out, 0, rows * PANEL * 4);
        if (rows <= FEW) {
            tiles_of(rows, [&](size_t first, int count) {
                with_rows(count, [&](auto R) {
                    add_stored<Q, R.value>(out + first * PANEL, panel, input(first), groups);
                });
            });
            return;
        }
        Unpacked<Q> unpacked;
        for (size_t g = 0; g < groups; g++) {
            unpacked.take(panel + g * Q::bytes);
            tiles_of(rows, [&](size_t first, int count) {
                with_rows(count, [&](auto R) {
                    if constexpr (2 * R.value >= ROWS)  // tiles of many rows are never small
                        add_unpacked<Q, R.value>(out + first * PANEL, unpacked, input(first), g);
                });
            });
        }
    }

    static INLINE vf biased(const float* values, const float* bias) {
        return bias ? load<vf>(values) + load<vf>(bias) : load<vf>(values);
    }

    template <class T> void project_qkv(const Layer& layer, size_t n, u32 left) {
        multiply<T>(left, layer.qkv, m.hidden, qkv_columns(), normed.as<u32>(), ld_hidden / T::per, n,
                    [&](size_t row, size_t column, const float* values) {
                        float* to = projected.as<float>() + row * ld_qkv + column;
                        const float* bias = layer.qkv.bias;
                        for (int v = 0; v < PANEL; v += W)
                            store(to + v, biased(values + v, bias ? bias + column + v : nullptr));
                    });
    }

    // residual += x . weight + bias.
    template <class T>
    void add_product(const Linear& linear, const u32* x, size_t ldx, size_t inner, size_t n, u32 left) {
        multiply<T>(left, linear, inner, m.hidden, x, ldx / T::per, n,
                    [&](size_t row, size_t column, const float* values) {
                        float* to = residual.as<float>() + row * ld_hidden + column;
                        const float* bias = linear.bias;
                        for (int v = 0; v < PANEL; v += W)
                            store(to + v, load<vf>(to + v) + biased(values + v, bias ? bias + column + v : nullptr));
                    });
    }

    // silu(gate) * up; columns come as vectors of gate and up in turn.
    template <class T> void gate(const Layer& layer, size_t n, u32 left) {
        multiply<T>(left, layer.gate_up, m.hidden, gate_columns(), normed.as<u32>(),
                    ld_hidden / T::per, n, [&](size_t row, size_t column, const float* values) {
                        u32* to = gated.as<u32>() + row * ld_gated / T::per;
                        float* exact = gated.as<float>() + row * ld_gated;
                        const bool rounds = layer.down.form != UNITS;
                        const float* bias = layer.gate_up.bias ? layer.gate_up.bias + column : nullptr;
                        const vf x = biased(values, bias), up = biased(values + W, bias ? bias + W : nullptr);
                        const vf value = x / (1.0f + exponential(-x)) * up;
                        if (rounds) store(exact + column / 2, value);
                        else T::put(to, column / 2, value);
                    });
    }

    // Norm and rotation of q and k; q to `queries`, k and v to their slots.
    template <class T> void place(Range tokens, const Layer& layer, size_t index) {
        const size_t all = m.heads + 2 * m.kv_heads, head = m.head_dim;
        for (size_t i = tokens.from * all; i < tokens.to * all; i++) {
            const size_t token = i / all, h = i % all;
            const float* x = projected.as<float>() + token * ld_qkv + h * head;
            const i32 position = positions.as<i32>()[token];
            const bool is_query = h < (size_t)m.heads, is_value = h >= (size_t)(m.heads + m.kv_heads);
            alignas(64) float turned[MOST_HEAD];
            if (!is_value) {
                x = normed_head(x, is_query ? layer.query_norm : layer.key_norm, turned);
                if (layer.rotated) x = rotate(x, position, turned);
            }
            if (is_query) {
                u32* to = queries.as<u32>() + token * m.heads * head / T::per;
                for (size_t d = 0; d < head; d += W) T::put(to, h * head + d, load<vf>(x + d));
                continue;
            }
            const i32* table = s.tables[owners.as<i32>()[token]];
            const size_t slot = position % m.block_size, kv_head = (h - m.heads) % m.kv_heads;
            u32* tile = m.kv + tile_at<T>(index, table[position / m.block_size], kv_head);
            alignas(64) u32 units[MOST_HEAD];
            for (size_t d = 0; d < head; d += W) T::put(units, d, load<vf>(x + d));
            if (!is_value) {
                for (size_t d = 0; d < head / T::per; d++) tile[d * m.block_size + slot] = units[d];
                continue;
            }
            tile += tile_units(T::per);
            if constexpr (T::per == 1) {
                std::memcpy(tile + slot * head, units, head * 4);
            } else {
                u16* to = reinterpret_cast<u16*>(tile + slot / 2 * head) + slot % 2;
                for (size_t d = 0; d < head; d++) to[2 * d] = reinterpret_cast<const u16*>(units)[d];
            }
        }
    }

    const float* normed_head(const float* x, const float* weight, float* to) const {
        if (!weight) return x;
        const float factor = inverse_rms(x, m.head_dim, m.head_dim);
        for (i64 d = 0; d < m.head_dim; d += W) store(to + d, load<vf>(x + d) * factor * load<vf>(weight + d));
        return to;
    }

    // Turns each pair (i, i + head_dim / 2) by its position's angle. `to` may be `x`.
    const float* rotate(const float* x, i32 position, float* to) const {
        const size_t half = m.head_dim / 2;
        const float* cosine = s.cosines + position * half;
        const float* sine = s.sines + position * half;
        for (size_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            to[i] = a * cosine[i] - b * sine[i];
            to[i + half] = b * cosine[i] + a * sine[i];
        }
        return to;
    }

    template <class T> size_t tile_at(size_t layer, size_t block, size_t kv_head) const {
        return ((layer * m.blocks + block) * m.kv_heads + kv_head) * 2 * tile_units(T::per);
    }

    template <class T>
    void attend(const Scratch& own, const Layer& layer, size_t index, const Tile& tile, size_t kv_head) {
        const size_t head = m.head_dim, units = head / T::per, heads = group(), rows = tile.count * heads;
        const int size = (int)m.block_size, end = tile.position + tile.count;
        const auto least = [&](int position) {  // the first position a token at `position` sees
            return layer.window && position >= layer.window ? (int)(position - layer.window + 1) : 0;
        };
        // Lanes hold the same positions whatever the tile, so that sums have one order.
        int first_block = least(tile.position) / size;
        while (first_block * size % W) first_block--;
        const int base = first_block * size, blocks = (end - base + size - 1) / size;
        const i32* table = s.tables[tile.row] + first_block;
        const u32** keys = own.tiles.as<const u32*>();
        const u32** values = keys + blocks;
        for (int b = 0; b < blocks; b++) {
            keys[b] = m.kv + tile_at<T>(index, table[b], kv_head);
            values[b] = keys[b] + tile_units(T::per);
        }
        u32* q = own.queries.as<u32>();
        for (int i = 0; i < tile.count; i++)
            std::memcpy(q + i * heads * units,
                        queries.as<u32>() + ((tile.first + i) * m.heads + kv_head * heads) * units,
                        heads * units * 4);
        float* scores = own.scores.as<float>();
        const size_t stride = scores_stride(end - base);
        const int each = (size + W - 1) / W;  // vectors of keys in a block
        for (int first = 0; first < blocks * each; first += 2) {
            const u32* vectors[2];
            float* to[2];
            std::ptrdiff_t ahead[2];
            for (int i = 0; i < 2; i++) {
                const int at = std::min(first + i, blocks * each - 1), b = at / each, key = at % each * W;
                // Blocks lie anywhere, so the hardware cannot see the next one coming. V follows.
                const int next = b + AHEAD;
                const u32* tile = next < blocks ? keys[next] : values[std::min(next - blocks, blocks - 1)];
                vectors[i] = keys[b] + key;
                ahead[i] = tile - keys[b];
                to[i] = scores + b * size + key;
            }
            // A vector may reach past its block: what the next one writes comes later.
            tiles_of(rows, [&](size_t row, int count) {
                float* const here[2] = {to[0] + row * stride, to[1] + row * stride};
                with_rows(count, [&](auto R) {
                    score<T, R.value>(vectors, size, q + row * units, units, here, stride, ahead);
                });
            });
        }
        float* out = own.out.as<float>();
        float* totals = out + rows * head;
        for (size_t r = 0; r < rows; r++) {
            const int position = tile.position + (int)(r / heads);
            totals[r] = softmax<T>(scores + r * stride, least(position) - base, position + 1 - base, end - base);
        }
        const Values seen{values, least(tile.position) - base, end - base, size, (int)head};
        tiles_of(rows, [&](size_t first, int count) {
            const u32* p = reinterpret_cast<const u32*>(scores + first * stride);
            with_rows(count, [&](auto R) {
                constexpr int MOST = R.value <= ROWS / 2 ? 4 : 2;  // vectors, as registers allow
                for (size_t d = 0; d < head;) {
                    const int vectors = (int)std::min<size_t>(MOST, (head - d) / W);
                    with_number<MOST>(vectors, [&](auto V) {
                        weigh<T, R.value, V.value>(seen, (int)d, p, stride, out + first * head + d, head);
                    });
                    d += vectors * W;
                }
            });
        });
        for (size_t r = 0; r < rows; r++) {
            const size_t token = tile.first + r / heads, at = (kv_head * heads + r % heads) * head;
            u32* to = attended.as<u32>() + token * m.heads * units;
            float* exact = attended.as<float>() + token * m.heads * head + at;
            const vf factor = splat(1.0f / totals[r]);
            for (size_t d = 0; d < head; d += W) {
                const vf value = load<vf>(out + r * head + d) * factor;
                if (layer.output.form == UNITS) T::put(to, at + d, value);
                else store(exact + d, value);
            }
        }
    }

    // Scores to weights, in place and in units; 0 outside [from, to) up to `end`. Returns their sum.
    template <class T> float softmax(float* scores, int from, int to, int end) const {
        const vf never = splat(-INFINITY);
        const vi lane = lanes();
        vf most = never;
        const auto inside = [&](int i) { return (lane + i >= from) & (lane + i < to); };
        for (int i = from / W * W; i < to; i += W) {
            const vf x = inside(i) ? load<vf>(scores + i) : never;
            most = x > most ? x : most;
        }
        float peak = most[0];
        for (int i = 1; i < W; i++) peak = most[i] > peak ? most[i] : peak;
        const float scale = (float)m.scale;
        vf total = {};
        u32* weights = reinterpret_cast<u32*>(scores);
        for (int i = 0; i < end; i += W) {
            const vf weight = inside(i) ? exponential((load<vf>(scores + i) - peak) * scale) : vf{};
            total += weight;
            T::put(weights, i, weight);
        }
        return sum(total);
    }

    // Moves what the sampled tokens need to the front.
    template <class T> void compact(i64 form) {
        const size_t units = m.heads * m.head_dim / (form == UNITS ? T::per : 1);
        for (i64 i = 0; i < s.outputs; i++) {
            const size_t from = s.sampled[i];
            std::memmove(residual.as<float>() + i * ld_hidden, residual.as<float>() + from * ld_hidden,
                         ld_hidden * 4);
            std::memmove(attended.as<u32>() + i * units, attended.as<u32>() + from * units, units * 4);
        }
    }

    // Logits of the sampled tokens, and the greatest of each lane.
    template <class T> void choose(const Scratch& own, u32 left) {
        const size_t vocab = m.vocab;
        vf* best = own.best.as<vf>();
        vi* where = own.where(s.outputs);
        vf* faults = own.faults(s.outputs);
        const vi lane = lanes();
        multiply<T>(left, m.head, m.hidden, vocab, normed.as<u32>(), ld_hidden / T::per, s.outputs,
                    [&](size_t row, size_t column, const float* values) {
                        if (s.kept[row] >= 0) {
                            const size_t count = std::min<size_t>(PANEL, vocab - column);
                            std::memcpy(s.logits + s.kept[row] * vocab + column, values, count * 4);
                        }
                        for (int v = 0; v < PANEL; v += W) {
                            const vi id = lane + (i32)(column + v);
                            const vf x = load<vf>(values + v);
                            faults[row] += x * 0.0f;  // columns of padding are 0
                            const vi better = (x > best[row]) & (id < (i32)vocab);
                            best[row] = better ? x : best[row];
                            where[row] = better ? id : where[row];
                        }
                    });
    }

    void settle() {
        for (i64 i = 0; i < s.outputs; i++) {
            float most = -INFINITY, fault = 0;
            i32 id = -1;
            for (auto& own : scratch) {
                const vf best = own.best.as<vf>()[i];
                const vi where = own.where(s.outputs)[i];
                fault += sum(own.faults(s.outputs)[i]);
                for (int v = 0; v < W; v++)
                    if (best[v] > most || (best[v] == most && where[v] < id)) most = best[v], id = where[v];
            }
            s.best[i] = fault == 0 ? id : -1;
        }
    }
};

}  // namespace

// ---------------------------------------------------------------- entry points

namespace {

// Column of the source that stands at `column` of the packed ones, or -1 for padding; `pairs` as in pk_pack.
i64 source_of(size_t column, size_t columns, bool pairs) {
    const size_t half = columns / 2, place = column / (2 * W) * W + column % W;
    if (!pairs) return column < columns ? (i64)column : -1;
    return place < half ? (i64)(place + (column / W % 2 ? half : 0)) : -1;
}

}  // namespace

extern "C" {

// Lanes of a vector: what padding of norms and the order of gate and up depend on.
PUBLIC i64 pk_lanes() { return W; }

// Units of a packed weight of so many columns.
PUBLIC i64 pk_packed(i64 columns, i64 inner, i64 wide) {
    return padded(columns, PANEL) * (inner / (wide ? 1 : 2));
}

// Packs `weight`, [columns][inner] of float32 (wide) or bfloat16. With `pairs` its first half are gates and
// its second half their partners; vectors of both then take turns.
PUBLIC void pk_pack(u32* to, const void* weight, i64 columns, i64 inner, i64 wide, i64 pairs) {
    const size_t k = inner / (wide ? 1 : 2);
    const size_t all = pairs ? 2 * padded(columns / 2, W) : columns;
    for (size_t column = 0; column < padded(all, PANEL); column++) {
        const i64 source = source_of(column, columns, pairs);
        u32* out = to + column / PANEL * PANEL * k + column % PANEL;
        const u32* in = static_cast<const u32*>(weight) + source * (i64)k;
        for (size_t i = 0; i < k; i++) out[i * PANEL] = source < 0 ? 0 : in[i];
    }
}

// Bytes of packed quantised weights of so many columns.
PUBLIC i64 pk_packed_groups(i64 columns, i64 groups, i64 form) {
    return padded(columns, PANEL) / PANEL * groups * (form == NIBBLES ? Nibbles::bytes : Bytes::bytes);
}
}

namespace {

template <class Q>
void pack_groups(u8* to, const u8* weight, const u16* scales, const u16* offsets, size_t columns, size_t groups,
                 bool pairs) {
    const size_t all = pairs ? 2 * padded(columns / 2, W) : columns;
    for (size_t column = 0; column < padded(all, PANEL); column++) {
        const i64 source = source_of(column, columns, pairs);
        if (source < 0) continue;
        const size_t lane = column % PANEL;
        u8* out = to + column / PANEL * groups * Q::bytes;
        for (size_t g = 0; g < groups; g++, out += Q::bytes) {
            std::memcpy(out + lane * 2, scales + source * groups + g, 2);
            if (Q::offset) std::memcpy(out + (PANEL + lane) * 2, offsets + source * groups + g, 2);
            const u8* q = weight + (source * groups + g) * GROUP;
            for (int word = 0; word < Q::words; word++) {
                const u32 value = Q::word(q + word * 2 * Q::parts);
                std::memcpy(out + Q::weights + (word * PANEL + lane) * 4, &value, 4);
            }
        }
    }
}

}  // namespace

extern "C" {

// Packs quantised weights into zeroed memory: [columns][groups][32] of a byte each, as the form stores them, with
// half precision scales and offsets, [columns][groups]. `pairs` as in pk_pack.
PUBLIC void pk_pack_groups(u8* to, const u8* weight, const u16* scales, const u16* offsets, i64 columns, i64 groups,
                           i64 form, i64 pairs) {
    if (form == NIBBLES) pack_groups<Nibbles>(to, weight, scales, offsets, columns, groups, pairs);
    else pack_groups<Bytes>(to, weight, scales, offsets, columns, groups, pairs);
}

// Null when there is no memory or no thread to be had.
PUBLIC void* pk_start(const Model* model) {
    try {
        auto engine = std::make_unique<Engine>(*model);
        engine->start();
        return engine.release();
    } catch (...) {
        return nullptr;
    }
}

// 0, or 1 when there is no memory; nothing has changed then.
PUBLIC i32 pk_step(void* engine, const Step* step) {
    try {
        static_cast<Engine*>(engine)->run(*step);
        return 0;
    } catch (...) {
        return 1;
    }
}

// Draws alone, on this thread. 0, or 1 when there is no memory.
PUBLIC i32 pk_pick(const float* logits, i64 vocab, const Draw* draws, i64 count, i32* picked) {
    try {
        Candidates candidates;
        candidates.reserve(vocab);
        for (i64 i = 0; i < count; i++)
            picked[i] = candidates.pick(logits + draws[i].row * vocab, vocab, draws[i]);
        return 0;
    } catch (...) {
        return 1;
    }
}

PUBLIC void pk_stop(void* engine) { delete static_cast<Engine*>(engine); }
}

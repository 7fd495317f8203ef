// Vectors, units, and the loops over them. A unit is what step.cpp says.

#pragma once

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
// What is fetched while memory is busy may not come, so everything is fetched once more when it is needed soon.
constexpr int AHEAD = 4, SOON = 2;  // blocks of K and V fetched before they are needed
constexpr size_t SOON_INPUTS = 48;  // units of input whose weights are fetched before they are needed
constexpr size_t PACE = 11;  // products of vectors in which two cores' memory brings each of them a line
constexpr int STREAMED = 4;  // rows that the hardware fetches weights for as fast as memory can
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
// To spread from memory costs nothing, from another kind of register much; and to keep it for later costs a register.
INLINE vu spread(const u32& x) {
#if defined(__AVX2__)
    vu all;
    asm volatile("vpbroadcastd %1, %0" : "=v"(all) : "m"(x));
    return all;
#else
    return vu{} + x;
#endif
}
INLINE float as_float(u32 bits) { return load<float>(&bits); }

size_t padded(size_t n, size_t to) { return (n + to - 1) / to * to; }

INLINE vi lanes() {
    vi v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

INLINE float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
#endif
}

// Of numbers none of which is NaN.
INLINE float greatest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// Whole numbers below 2^22 stand in the low bits of what is added to it.
constexpr float WHOLE = 12582912.0f, TO_POWER_OF_2 = 1.44269504f;

// What e^x of either kind begins and ends with: 0 and infinity are rounded to the least and most normal numbers, NaN stays NaN.
INLINE vf clamped(vf x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    return x > 88.0f ? splat(88.0f) : x;
}
INLINE vf scaled(vf x, vf shifted) { return x * (vf)(((vu)shifted + 127u) << 23); }

// e^x to about 1e-7.
INLINE vf exponential(vf x) {
    x = clamped(x);
    const vf shifted = x * TO_POWER_OF_2 + WHOLE;
    const vf whole = shifted - WHOLE;
    const vf r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return scaled(p * r * r + r + 1.0f, shifted);
}

// e^x to about 3e-6: a polynomial of the least relative error for 2 to the power of -1/2 to 1/2.
INLINE vf rough_exponential(vf x) {
    x = clamped(x);
    const vf shifted = x * TO_POWER_OF_2 + WHOLE;
    const vf r = x * TO_POWER_OF_2 - (shifted - WHOLE);
    vf p = splat(9.570101434e-3f);
    p = p * r + 5.591786028e-2f;
    p = p * r + 2.402474484e-1f;
    p = p * r + 6.931218147e-1f;
    return scaled(p * r + 9.999992614e-1f, shifted);
}

// ---------------------------------------------------------------- the two kinds of unit

#if defined(__AVX2__) && !defined(__AVX512F__)
alignas(32) const vu HIGH = vu{} + 0xffff0000u;
#endif

struct Bf16 {
    static constexpr int per = 2;

#if defined(__AVX512BF16__)
    static constexpr int halves = 1;
    static INLINE vu half(vu w, int) { return w; }
    static INLINE vu half(const u32& x, int) { return vu{} + x; }
    static INLINE vf dot(vf acc, vu w, vu x) {
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
    }
#else
    // One half of all units after the other, so that registers hold no more than the weights of one.
    static constexpr int halves = 2;
    static INLINE vf half(vu w, int high) {
        if (!high) return (vf)(w << 16);
#if defined(__AVX2__) && !defined(__AVX512F__)
        vf own;
        asm("vpand %2, %1, %0" : "=v"(own) : "v"(w), "m"(HIGH));  // a register for it would be one too many
        return own;
#else
        return (vf)(w & 0xffff0000u);
#endif
    }
    static INLINE vf half(const u32& x, int high) { return half(spread(x), high); }
    static INLINE vf dot(vf acc, vf w, vf x) { return acc + w * x; }
#endif

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
    static INLINE vf exp(vf x) { return rough_exponential(x); }
};

struct F32 {
    static constexpr int per = 1;
    static constexpr int halves = 1;
    static INLINE vf half(vu w, int) { return (vf)w; }
    static INLINE vf half(const u32& x, int) { return splat(as_float(x)); }
    static INLINE vf dot(vf acc, vf w, vf x) { return acc + w * x; }
    static INLINE void put(u32* base, size_t index, vf x) { store(base + index, x); }
    static INLINE float get(const void* base, size_t index) {
        return static_cast<const float*>(base)[index];
    }
    static INLINE vf exp(vf x) { return exponential(x); }
};

// To every second one of the 16-bit numbers from `to` on; the others may be another thread's.
INLINE void put_alternate(u16* to, const u16* from) {
#if defined(__AVX512BW__)
    _mm512_mask_storeu_epi16(to, 0x55555555u, (__m512i)__builtin_convertvector(load<vh>(from), vu));
#else
    for (int i = 0; i < W; i++) to[2 * i] = from[i];
#endif
}

template <int N> struct Number {
    static constexpr int value = N;
};

// Into the second level of cache: far fewer lines can be on their way into the first.
INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// acc[r][v] += w[v] . *x(r).
template <class T, int R, int NV, class X> INLINE void dots(vf (&acc)[R][NV], const vu (&w)[NV], X x) {
#pragma GCC unroll 2
    for (int half = 0; half < T::halves; half++) {
        decltype(T::half(vu{}, 0)) wide[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) wide[v] = T::half(w[v], half);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const auto input = T::half(*x(r), half);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] = T::dot(acc[r][v], wide[v], input);
        }
    }
}

// What is fetched beside a product.
struct Fetched {
    const u32* from;
    size_t apart;  // units from one input's first line to the next one's
    const u32* of(size_t i) const { return from + i * apart; }
};

// acc[r][v] += w[i][v] . x[r][i] for i below n. With each i come LINES lines of `next`, LATER of `later`, and of
// `soon`, which lies as `w` does, AGAIN.
template <class T, int LINES, int LATER, int AGAIN, int R, int NV>
INLINE void accumulate(vf (&acc)[R][NV], const u32* w, size_t step, const u32* x, size_t ldx, size_t n,
                       Fetched next, Fetched later, const u32* soon) {
    constexpr int EACH = 4, PARTS = (R + EACH - 1) / EACH;  // rows reached from one address by registers' multiples
    const u32* from[PARTS];
#pragma GCC unroll 3
    for (int p = 0; p < PARTS; p++) from[p] = x + p * EACH * ldx;
    for (size_t i = 0; i < n; i++, w += step) {
        vu part[NV];
        if (LINES && next.from)
#pragma GCC unroll 4
            for (int line = 0; line < LINES; line++) fetch(next.of(i) + line * LINE);
        if (LATER) fetch(later.of(i));
        if (AGAIN && soon)
#pragma GCC unroll 4
            for (int line = 0; line < AGAIN; line++) fetch(soon + i * step + line * LINE);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) part[v] = load<vu>(w + v * W);
        dots<T>(acc, part, [&](int r) __attribute__((always_inline)) { return from[r / EACH] + r % EACH * ldx + i; });
    }
}

// Lines that follow each other.
struct Lines {
    const u32* from;
    size_t count;
};

// out[r] = sum over i of w[i] . x[r][i], of one panel w. `next` is fetched on the way, and of `later` what memory has
// time for, both evenly: where much is asked for at a time, everything else waits for it.
template <class T, int R, class Later>
void product(const u32* w, const u32* x, size_t ldx, size_t n, float* out, Lines next, Later& later) {
    constexpr int LINES = (PANEL + LINE - 1) / LINE;
    constexpr int AGAIN = R > STREAMED ? LINES : 0;
    vf acc[R][VECTORS] = {};
    size_t done = 0;
    const auto run = [&](auto lines, auto more, size_t count, size_t apart, Fetched kept) {
        const u32* here = w + done * PANEL;
        const Fetched weights{next.from ? next.from + done * apart : nullptr, apart};
        accumulate<T, lines.value, more.value, AGAIN>(acc, here, PANEL, x + done, ldx, count, weights, kept,
                                                      here + SOON_INPUTS * PANEL);
        done += count;
    };
    if (next.count > n) {
        run(Number<LINES>{}, Number<0>{}, n, LINES * LINE, {});
    } else {
        const size_t apart = (next.count * LINE + n - 1) / n, time = n * R * VECTORS / PACE;
        const size_t left = next.from && time > next.count ? std::min(time - next.count, n) : 0, pace = LINE * left / n;
        for (int part = 0; part < 2 && pace; part++) {
            const Lines some = later.take((n - done) * pace / LINE);
            if (some.count) run(Number<1>{}, Number<1>{}, some.count * LINE / pace, apart, {some.from, pace});
        }
        run(Number<1>{}, Number<0>{}, n - done, apart, {});
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(out + r * PANEL + v * W, acc[r][v]);
}

// Scores of the keys of two vectors of K at once: out[i][r] = sum over d of keys[i][d] . q[r][d].
template <class T, int R>
void score(const u32* const (&keys)[2], size_t step, const u32* q, size_t n, float* const (&out)[2], size_t ldo,
           const std::ptrdiff_t (&ahead)[2], const std::ptrdiff_t (&soon)[2]) {
    vf acc[R][2] = {};
    for (size_t d = 0; d < n; d++) {
        const u32 *a = keys[0] + d * step, *b = keys[1] + d * step;
        fetch(a + ahead[0]);
        fetch(b + ahead[1]);
        fetch(a + soon[0]);
        fetch(b + soon[1]);
        const vu part[2] = {load<vu>(a), load<vu>(b)};
        dots<T>(acc, part, [&](int r) __attribute__((always_inline)) { return q + r * n + d; });
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
        const auto behind = [&](int blocks) {
            return (block + blocks) * size < values.to ? values.tiles[block + blocks] + dim : nullptr;
        };
        const auto single = [&](int unit, u32 mask) {  // one key of a pair whose other one does not count
            for (int v = 0; v < NV; v++) {
                const vu kept = load<vu>(tile + (size_t)unit * head + v * W) & mask;
                for (int r = 0; r < R; r++)
                    for (int half = 0; half < T::halves; half++)
                        acc[r][v] = T::dot(acc[r][v], T::half(kept, half), T::half(weights[r * ldp + unit], half));
            }
        };
        if (T::per == 2 && from % 2) single(from++ / 2, 0xffff0000u);
        constexpr int LINES = (NV * W + LINE - 1) / LINE;
        accumulate<T, LINES, 0, LINES>(acc, tile + (size_t)(from / T::per) * head, head, weights + from / T::per, ldp,
                                       to / T::per - from / T::per, {behind(AHEAD), (size_t)head}, {}, behind(SOON));
        if (T::per == 2 && to % 2) single(to / 2, 0x0000ffffu);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(out + r * ldo + v * W, acc[r][v]);
}

// Calls f with `n`, 1 to MOST, as a constant.
template <int MOST, class F> INLINE void with_number(int n, const F& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        ((n == I + 1 ? f(Number<I + 1>{}) : void()), ...);
    }(std::make_integer_sequence<int, MOST>{});
}
template <class F> INLINE void with_rows(int rows, const F& f) { with_number<ROWS>(rows, f); }

}  // namespace

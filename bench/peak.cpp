// How many products a second one core of this CPU can do at most, for bench.roofline.

#include <chrono>

#ifdef __AVX512BF16__
#include <immintrin.h>
using Sum = __m512;
static inline Sum add(Sum sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
static const __m512bh A = (__m512bh)_mm512_set1_epi32(0x3f803f80), B = (__m512bh)_mm512_set1_epi32(0x3c003c00);
constexpr double FLOPS = 64;  // of one instruction
#else
#ifdef __AVX512F__
typedef float Sum __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float Sum __attribute__((vector_size(32)));
#else
typedef float Sum __attribute__((vector_size(16)));
#endif
static inline Sum add(Sum sum, Sum a, Sum b) { return sum + a * b; }
static const Sum A = Sum{} + 1.0f, B = Sum{} + 0.0078125f;
constexpr double FLOPS = sizeof(Sum) / 4 * 2;
#endif

// FLOP/s over `seconds`. Twelve sums hide the latency of each; all stay in registers.
extern "C" __attribute__((visibility("default"))) double peak(double seconds) {
  using clock = std::chrono::steady_clock;
  Sum s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, s10{}, s11{};
  const auto a = A;
  const auto b = B;
  const auto began = clock::now();
  double did = 0, took = 0;
  do {
    for (int i = 0; i < 2000; i++) {
#ifdef __x86_64__
#define STEP(s) s = add(s, a, b); asm volatile("" : "+v"(s));
#else
#define STEP(s) s = add(s, a, b); asm volatile("" : "+w"(s));
#endif
      STEP(s0) STEP(s1) STEP(s2) STEP(s3) STEP(s4) STEP(s5)
      STEP(s6) STEP(s7) STEP(s8) STEP(s9) STEP(s10) STEP(s11)
    }
    did += 2000.0 * 12 * FLOPS;
    took = std::chrono::duration<double>(clock::now() - began).count();
  } while (took < seconds);
  return did / took;
}

// What threads share: stages and strips of a step, memory, and what is fetched ahead.

#pragma once

#include "vectors.h"

namespace {

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

// One stage of a step, in pieces. Each thread begins with a share of them, from front to back, because it reads
// memory that goes on where it stopped faster than what takes turns, and for the next stage finds in its cache
// what it left there. Then it takes what others have left, from the back: one that lost its core keeps nobody
// waiting but for the piece in its hand. A stage is over when its pieces are, not when all threads have seen it.
// Every word holds the step's number: a thread from an earlier step finds another one and leaves. What a step
// points to may be read only with a piece in hand, for only then must the step still be going on.
class Stage {
  public:
    static constexpr size_t SHARES = 8;  // several threads have one where there are more

    static size_t shares(size_t pieces, size_t threads) { return std::min({pieces, threads, SHARES}); }

    void open(u32 step, size_t pieces, size_t threads) {
        const size_t count = shares(pieces, threads);
        pending_.store((u64)step << 32 | pieces, std::memory_order_relaxed);
        count_.store((u32)count, std::memory_order_relaxed);
        for (size_t i = 0; i < count; i++) {
            const u64 from = pieces * i / count, to = pieces * (i + 1) / count;
            shares_[i].store(tag(step) | from << BITS | to, std::memory_order_release);
        }
    }

    // Calls f(piece, the one that most likely follows or -1) for each piece taken; returns false if the step is
    // another one.
    template <class F> bool run(u32 step, size_t thread, size_t threads, const F& f) {
        u32 done = 0;
        const size_t count = count_.load(std::memory_order_acquire);
        for (size_t i = 0; i < count; i++) {
            const bool own = i == 0;
            std::atomic<u64>& share = shares_[(thread * count / threads + i) % count];
            for (u64 word = share.load(std::memory_order_acquire);;) {
                const i64 from = word >> BITS & END, to = word & END;
                if (word - word % (1ull << 2 * BITS) != tag(step) || from == to) break;
                const u64 rest = own ? word + (1ull << BITS) : word - 1;
                if (!share.compare_exchange_weak(word, rest, std::memory_order_acquire)) continue;
                const i64 next = own ? from + 1 : to - 2;
                f((size_t)(own ? from : to - 1), to - from > 1 ? next : -1);
                done++;
                word = share.load(std::memory_order_acquire);
            }
        }
        if (done) pending_.fetch_sub(done, std::memory_order_release);
        for (int spins = 0;; spins++) {
            const u64 word = pending_.load(std::memory_order_acquire);
            if (word >> 32 != step) return false;
            if ((u32)word == 0) return true;
            relax(spins);
        }
    }

  private:
    static constexpr int BITS = 22;
    static constexpr u64 END = (1ull << BITS) - 1;

    // A thread that slept through all numbers a tag can have takes a piece of the step that goes on, as others do.
    static u64 tag(u32 step) { return (u64)step << 2 * BITS; }

    std::atomic<u32> count_{0};
    alignas(64) std::atomic<u64> pending_{0};
    struct alignas(64) Share : std::atomic<u64> { using std::atomic<u64>::atomic; } shares_[SHARES]{};
};

// Strips of consecutive tokens, which threads take through the layers, each at its own pace: what a layer of a
// strip computes stays in one core's cache, and a thread that loses its core holds up one strip and not the step.
// A layer of a strip has two parts, up to its K and V and from its attention on. The second one also waits for the
// first of all strips whose K and V it reads. A strip's word holds the step's number above twice its parts done,
// and one if it is in hand; as with stages, a thread from an earlier step finds another number and leaves.
class Strips {
  public:
    static constexpr size_t MOST = 64;

    // needs[i]: the strips whose K and V strip i reads, as bits.
    void open(u32 step, size_t count, const u64* needs) {
        count_.store(count, std::memory_order_relaxed);
        for (size_t i = 0; i < count; i++) needs_[i].store(needs[i], std::memory_order_relaxed);
        for (size_t i = 0; i < count; i++) words_[i].store((u64)step << 32, std::memory_order_release);
    }

    // Calls f(strip, parts done) for each part this thread takes, until all strips have all `parts` behind them;
    // returns false if the step is another one.
    template <class F> bool run(u32 step, size_t thread, size_t threads, u32 parts, const F& f) {
        for (int spins = 0;; spins++) {
            const size_t count = count_.load(std::memory_order_relaxed);
            size_t best = MOST;
            u64 least = ~0ull, taken = 0;
            bool over = true;
            for (size_t i = 0; i < count; i++) {
                const u64 word = words_[i].load(std::memory_order_acquire);
                if (word >> 32 != step) return false;
                if ((u32)word == 2 * parts) continue;  // done, and nobody will write to it again
                over = false;
                const u32 done = (u32)word / 2;
                const u64 rank = done + (i * threads / count == thread ? 0 : LEAD);
                if (word % 2 || rank >= least || !ready(i, count, done)) continue;
                best = i, least = rank, taken = word;
            }
            if (over) return true;
            if (best == MOST || !words_[best].compare_exchange_strong(taken, taken + 1, std::memory_order_acquire)) {
                relax(spins);
                continue;
            }
            spins = -1;
            u32 done = (u32)taken / 2;
            f(best, done++);
            if (done % 2) {  // its K and V are there: others may read them while its attention goes on
                words_[best].store((u64)step << 32 | done * 2 | 1, std::memory_order_release);
                if (ready(best, count, done)) f(best, done++);
            }
            // What ends a step must be the last that is written in it: the next one may begin at once.
            words_[best].store((u64)step << 32 | done * 2, std::memory_order_release);
        }
    }

  private:
    static constexpr u32 LEAD = 4;  // parts by which a strip that another thread begins with must be behind

    // Only strips of the same step have a part to do, so words of others need no look at their number.
    bool ready(size_t strip, size_t count, u32 done) const {
        if (done % 2 == 0) return true;
        const u64 needs = needs_[strip].load(std::memory_order_relaxed);
        for (size_t i = 0; i < count; i++)
            if (needs >> i & 1 && (u32)words_[i].load(std::memory_order_acquire) / 2 < done) return false;
        return true;
    }

    std::atomic<size_t> count_{0};
    std::atomic<u64> needs_[MOST]{};
    struct alignas(64) Word : std::atomic<u64> { using std::atomic<u64>::atomic; } words_[MOST]{};
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

// What the attention to come reads, fetched while products leave memory idle: blocks of one layer's K and V.
class Later {
  public:
    void begin(const u32* layer, size_t lines, const i32* blocks, size_t count) {
        layer_ = layer, lines_ = lines, blocks_ = blocks, at_ = 0;
        left_ = std::min(count * lines, MOST);
    }
    // At most so many of the next lines.
    Lines take(size_t most) {
        if (!left_) return {};
        const size_t within = at_ % lines_;
        const size_t count = std::min({most, left_, lines_ - within});
        const u32* from = layer_ + (blocks_[at_ / lines_] * lines_ + within) * LINE;
        at_ += count, left_ -= count;
        return {from, count};
    }

  private:
    static constexpr size_t MOST = (8u << 20) / 64;  // of them may be gone again before they are read

    const u32* layer_ = nullptr;
    const i32* blocks_ = nullptr;
    size_t lines_ = 1, at_ = 0, left_ = 0;  // lines of a block, lines taken, lines to take
};

}  // namespace

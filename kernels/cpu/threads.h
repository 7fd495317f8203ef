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
        const size_t within = at_ % lines_;
        const size_t count = std::min({most, left_, lines_ - within});
        const u32* from = layer_ + (blocks_[at_ / lines_] * lines_ + within) * LINE;
        at_ += count, left_ -= count;
        return {from, count};
    }
    bool more() const { return left_; }

  private:
    static constexpr size_t MOST = (8u << 20) / 64;  // of them may be gone again before they are read

    const u32* layer_ = nullptr;
    const i32* blocks_ = nullptr;
    size_t lines_ = 1, at_ = 0, left_ = 0;  // lines of a block, lines taken, lines to take
};

}  // namespace

// Draws of tokens from rows of logits: temperature, then top-k, top-p and min-p, then one number in [0, 1).
//
// Candidates stand in order of falling logit, equal ones by id, and what is kept is a beginning of that order.
// Sorting a vocabulary for one token would cost more than the step of a small model, so the order is made only
// where it is looked at: one pass counts candidates and adds up their mass by distance from the greatest, in
// steps of 1/32; the step in which the draw falls is then sorted by itself.

#pragma once

#include "vectors.h"

extern "C" {
struct Draw {
    i64 row;  // of the logits
    i64 top_k;  // 0: all
    double temperature, top_p, min_p;
    u64 stream;  // of random numbers, which the sequence's own positions count
};
}

namespace {

// A number in [0, 1): of SplitMix64 (Steele, Lea and Flood, OOPSLA'14), at any place of its sequence at once.
inline double uniform(u64 stream, u64 position) {
    u64 z = stream + (position + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

class Candidates {
  public:
    // Takes all the memory that `pick` needs for so many candidates.
    void reserve(size_t vocab) {
        distances.resize(padded(vocab, W));
        weights.resize(padded(vocab, W));
        steps.resize(padded(vocab, W));
        sorted.reserve(vocab);
    }

    // The token that `draw` takes from `row` at this position of its sequence, or -1 if a logit is not finite.
    i32 pick(const float* row, size_t vocab, const Draw& draw, i32 position) {
        if (!measure(row, vocab, draw.temperature)) return -1;
        const double point = uniform(draw.stream, position);
        return draw.top_k ? among_best(draw, point) : among_all(draw, point);
    }

  private:
    static constexpr int STEPS = 1024;      // distances of 32 and more share the last
    static constexpr float PER_UNIT = 32;   // steps

    struct Place {
        i32 token;
        double mass;  // of all candidates up to it, itself included
        float weight;
    };
    using Entry = std::pair<float, i32>;  // distance and token

    std::vector<float> distances, weights;
    std::vector<i32> steps;
    std::vector<Entry> sorted;
    double masses[STEPS];
    double total;
    size_t size;

    bool measure(const float* row, size_t vocab, double temperature) {
        size = vocab;
        vf most = splat(-INFINITY), fault = vf{};
        size_t i = 0;
        for (; i + W <= vocab; i += W) {
            const vf x = load<vf>(row + i);
            most = x > most ? x : most;
            fault += x * 0.0f;
        }
        float peak = -INFINITY, wrong = sum(fault);
        for (int lane = 0; lane < W; lane++) peak = std::max(peak, most[lane]);
        for (; i < vocab; i++) peak = std::max(peak, row[i]), wrong += row[i] * 0.0f;
        if (!(wrong == 0) || !std::isfinite(peak)) return false;

        const float warmth = (float)std::max(temperature, 1e-6);
        float last[W];
        for (i = 0; i < vocab; i += W) {
            const float* from = row + i;
            if (i + W > vocab) {
                std::fill(last, last + W, -INFINITY);
                std::copy(row + i, row + vocab, last);
                from = last;
            }
            const vf distance = (load<vf>(from) - peak) / warmth;
            const vf far = distance * -PER_UNIT;
            store(&distances[i], distance);
            store(&weights[i], exponential(distance));
            store(&steps[i], __builtin_convertvector(far < STEPS - 1.0f ? far : splat(STEPS - 1.0f), vi));
        }
        // Neighbours often share a step, and a sum in memory waits for the one before: so four of each.
        double parts[STEPS][4] = {};
        for (i = 0; i < vocab; i++) parts[steps[i]][i % 4] += weights[i];
        total = 0;
        for (int step = 0; step < STEPS; step++) {
            const double* part = parts[step];
            total += masses[step] = (part[0] + part[1]) + (part[2] + part[3]);
        }
        return true;
    }

    // Fills `sorted` with the candidates of some steps, in order.
    void sort(int first, int end) {
        sorted.clear();
        for (size_t from = 0; from < size; from += 64) {
            const size_t to = std::min(from + 64, size);
            i32 some = 0;
            for (size_t i = from; i < to; i++) some |= (steps[i] >= first) & (steps[i] < end);
            if (!some) continue;
            for (size_t i = from; i < to; i++)
                if (steps[i] >= first && steps[i] < end) sorted.push_back({distances[i], (i32)i});
        }
        std::sort(sorted.begin(), sorted.end(), [](const Entry& a, const Entry& b) {
            return a.first != b.first ? a.first > b.first : a.second < b.second;
        });
    }

    // The first candidate with which the mass is more than `goal`; the last one if rounding hides it.
    Place past(double goal) {
        double before = 0;
        int step = 0, last = 0;
        for (; step < STEPS; step++) {
            if (masses[step] == 0) continue;
            if (before + masses[step] > goal) break;
            before += masses[step];
            last = step;
        }
        if (step == STEPS) before -= masses[step = last];
        sort(step, step + 1);
        Place place{};
        for (const Entry& entry : sorted) {
            const float weight = weights[entry.second];
            place = {entry.second, before += weight, weight};
            if (before > goal) break;
        }
        return place;
    }

    i32 among_all(const Draw& draw, double point) {
        double mass = total;
        if (draw.top_p < 1) mass = past(std::nextafter(draw.top_p * total, 0.0)).mass;
        if (draw.min_p > 0) {
            double enough = 0;
            for (size_t i = 0; i < size; i++)
                if (weights[i] >= draw.min_p) enough += weights[i];
            mass = std::min(mass, enough);
        }
        // Never the end itself, which rounding may reach: behind it lie candidates of no mass.
        const Place place = past(std::min(point * mass, std::nextafter(mass, 0.0)));
        return place.weight >= draw.min_p ? place.token : past(0).token;
    }

    i32 among_best(const Draw& draw, double point) {
        u32 counts[STEPS] = {};
        for (size_t i = 0; i < size; i++) counts[steps[i]]++;
        int end = 0;
        for (i64 seen = 0; end < STEPS && seen < draw.top_k; end++) seen += counts[end];
        sort(0, end);
        if ((i64)sorted.size() > draw.top_k) sorted.resize(draw.top_k);
        double whole = 0, mass = 0;
        for (const Entry& entry : sorted) whole += weights[entry.second];
        size_t kept = 0;
        for (; kept < sorted.size(); kept++) {
            const float weight = weights[sorted[kept].second];
            if (kept && (weight < draw.min_p || (draw.top_p < 1 && mass >= draw.top_p * whole))) break;
            mass += weight;
        }
        const double goal = std::min(point * mass, std::nextafter(mass, 0.0));
        double before = 0;
        for (size_t i = 0; i < kept; i++)
            if ((before += weights[sorted[i].second]) > goal) return sorted[i].second;
        return sorted[kept - 1].second;
    }
};

}  // namespace

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

#include "draw.h"
#include "quantised.h"
#include "threads.h"
#include "vectors.h"

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
    i64 ahead;                       // what all starts and positions lack
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
    const i32* positions;            // [draws], of the tokens drawn
    i32* picked;                     // [draws]
};
}

namespace {

// Consecutive tokens of one sequence that share each load of its K and V.
struct Tile {
    i32 row, first, count, position;  // `first` in the flat batch, `position` in the sequence
    bool sampled;                     // whether one of the tokens is
};

// Rows of a product's input.
struct Input {
    Buffer units;                   // normed
    Buffer integers, sums, worths;  // or what quantised weights take
};

struct Scratch {  // of one thread
    Later later;
    Input input;      // of a product, in small steps
    size_t prepared;  // the last product that was begun
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
constexpr size_t SMALL = 32;  // tokens for which it costs less to do a thing twice than to wait for each other
constexpr size_t WORTH = 64;  // rows times panels of a piece of a product, at least
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
    Strips strips;
    std::atomic<bool> in_strips{false};   // the layers of this step
    std::vector<size_t> strip_tiles;      // of each strip the first one; and the end
    std::vector<i32> blocks_read;         // by the strips, one after the other
    std::vector<size_t> strip_blocks;     // of each strip the first one; and the end
    struct Writers {
        u64 strips;  // as bits
        u32 step;    // in which they write
        i32 row;     // the last one that does
    };
    std::vector<Writers> writers;  // of each block
    std::atomic<u32> number{0};  // of the step
    std::atomic<bool> stopping{false};

    Buffer residual, projected, queries, attended, gated, positions, owners;
    Input input;        // of the next product
    bool small;         // whether in this step each thread prepares inputs of products for itself
    bool apart;         // whether no token reads what another one of this step writes
    std::vector<Tile> tiles;
    size_t ld_hidden, ld_qkv, ld_gated;  // padded to whole panels
    size_t ld_integers;                  // in pairs

    struct Range {
        size_t from, to;
    };

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
        small = n <= SMALL;
        residual.reserve(n * ld_hidden * 4);
        projected.reserve(n * ld_qkv * 4);
        queries.reserve(n * m.heads * m.head_dim * 4);
        attended.reserve(n * m.heads * m.head_dim * 4);
        gated.reserve(n * ld_gated * 4);
        reserve(input, n);
        positions.reserve(n * 4);
        owners.reserve(n * 4);
        tiles.clear();
        const i32 most = std::max<i32>(1, ROWS / group());
        size_t longest = 0;
        i32 token = 0;
        i64 output = 0;
        const size_t count = strips_of(n);
        strip_tiles.clear();
        for (i32 row = 0; row < s.rows; row++) {
            const i32 start = s.starts[row] + (i32)s.ahead;
            for (i32 i = 0; i < s.counts[row]; i++, token++) {
                positions.as<i32>()[token] = start + i;
                owners.as<i32>()[token] = row;
                const bool opens = (size_t)token == n * strip_tiles.size() / count;
                if (opens) strip_tiles.push_back(tiles.size());
                if (i == 0 || opens || tiles.back().count == most)
                    tiles.push_back({row, token, 0, start + i, false});
                tiles.back().count++;
                if (output < s.outputs && s.sampled[output] == token) tiles.back().sampled = true, output++;
            }
            longest = std::max<size_t>(longest, start + s.counts[row]);
        }
        const size_t rows = most * group();
        for (auto& own : scratch) {
            own.later = {};
            own.prepared = ~(size_t)0;
            if (small) reserve(own.input, n);
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
        strip_tiles.resize(count + 1, tiles.size());
        const u32 next = number.load(std::memory_order_relaxed) + 1;
        open_strips(next, count);
        in_strips.store(count > 1, std::memory_order_relaxed);
        for (size_t i = 0; i < stages.size(); i++)
            if (count == 1 || i < BEFORE || i >= behind_strips()) stages[i].open(next, pieces(i), m.threads);
    }

    void reserve(Input& rows, size_t n) {
        rows.units.reserve(n * ld_hidden * 4);
        rows.integers.reserve(n * ld_integers * 4);
        rows.sums.reserve(n * ld_integers / PAIRS * 4);
        rows.worths.reserve(n * 4);
    }

    // Strips that the layers of so many tokens are shared out in; with one, threads share out columns instead. Each
    // strip reads all weights, so few tokens are better off with columns.
    size_t strips_of(size_t tokens) const {
        constexpr size_t ENOUGH = 40, LEAST = 20;  // tokens for each thread, and of a strip
        const size_t threads = m.threads;
        return threads > 1 && tokens >= ENOUGH * threads ? std::min({tokens / LEAST, 4 * threads, Strips::MOST}) : 1;
    }

    Range strip_rows(size_t strip) const {
        const size_t count = strip_tiles.size() - 1;
        return {s.tokens * strip / count, s.tokens * (strip + 1) / count};
    }

    // Which blocks each strip reads, and which other strips write to them.
    void open_strips(u32 step, size_t count) {
        writers.resize(m.blocks);
        for (size_t strip = 0; strip < count; strip++)
            for (size_t token = strip_rows(strip).from; token < strip_rows(strip).to; token++) {
                Writers& of = writers[s.tables[owners.as<i32>()[token]][positions.as<i32>()[token] / m.block_size]];
                if (of.step != step) of = {0, step};
                of.strips |= 1ull << strip, of.row = owners.as<i32>()[token];
            }
        u64 needs[Strips::MOST] = {};
        apart = s.rows == s.tokens;
        blocks_read.clear();
        strip_blocks.clear();
        for (size_t strip = 0; strip < count; strip++) {
            strip_blocks.push_back(blocks_read.size());
            for (size_t i = strip_tiles[strip]; i < strip_tiles[strip + 1]; i++) {
                const Tile& tile = tiles[i];
                if (i + 1 < strip_tiles[strip + 1] && tiles[i + 1].row == tile.row) continue;  // which reads more
                for (i32 b = 0; b * m.block_size < tile.position + tile.count; b++) {
                    const i32 block = s.tables[tile.row][b];
                    blocks_read.push_back(block);
                    if (writers[block].step != step) continue;
                    needs[strip] |= writers[block].strips;
                    apart &= writers[block].row == tile.row;
                }
            }
            needs[strip] &= ~(1ull << strip);
        }
        strip_blocks.push_back(blocks_read.size());
        // Left closed where threads share out columns, lest one that is late for such a step takes a strip of it.
        if (count > 1) strips.open(step, count, needs);
    }

    static size_t first_stage(size_t layer) { return BEFORE + PER_LAYER * layer; }

    Kind kind(size_t stage) const {
        if (stage < BEFORE) return (Kind)stage;
        const size_t end = first_stage(layers.size());
        return (Kind)(stage < end ? NORM + (stage - BEFORE) % PER_LAYER : LAST_NORM + (stage - end));
    }

    // Rows of a stage: behind the last layer's attention only tokens that are sampled count.
    size_t rows_of(size_t stage) const {
        return stage >= stages.size() - LAST_PIECES ? s.outputs : s.tokens;
    }

    // The first stage behind what strips do: the last layer's COMPACT.
    size_t behind_strips() const { return stages.size() - LAST_PIECES - 1; }

    size_t pieces(size_t stage) const {
        const size_t n = rows_of(stage), each = n < 128 ? 4 : 16, some = (n + each - 1) / each;
        switch (kind(stage)) {
            case COPY: return s.copies * m.layers;
            case EMBED: return some;
            case NORM: case POST_NORM: case LAST_NORM: return small ? 0 : some;
            case ROUND_ATTENDED: case ROUND_GATED:  // for the product that follows
                return small || product_of(stage + 1).linear->form == UNITS ? 0 : some;
            case QKV: case OUTPUT: case GATE: case DOWN: case HEAD: {
                // Pieces of enough work that taking them costs nothing beside it, as many for each thread.
                const size_t panels = n ? product_of(stage).panels() : 0, shares = Stage::shares(panels, m.threads);
                return panels ? std::min(panels, padded(panels * n, shares * WORTH) / WORTH) : 0;
            }
            case PLACE: return apart ? 0 : some;
            case ATTEND: return tiles.size() * m.kv_heads;
            case COMPACT: return stage == behind_strips() && s.outputs < s.tokens;
            case DRAW: return s.draws;
        }
        return 0;
    }

    // What a stage multiplies, if it does.
    struct Product {
        const Linear* linear;
        size_t columns, inner;
        size_t panels() const { return padded(columns, PANEL) / PANEL; }
    };
    Product product_of(size_t stage) const {
        const Layer* layer = layer_of(stage);
        switch (kind(stage)) {
            case QKV: return {&layer->qkv, qkv_columns(), (size_t)m.hidden};
            case OUTPUT: return {&layer->output, (size_t)m.hidden, (size_t)(m.heads * m.head_dim)};
            case GATE: return {&layer->gate_up, gate_columns(), (size_t)m.hidden};
            case DOWN: return {&layer->down, (size_t)m.hidden, (size_t)m.intermediate};
            case HEAD: return {&m.head, (size_t)m.vocab, (size_t)m.hidden};
            default: return {};
        }
    }

    Range panels_of(size_t stage, size_t piece) const {
        const size_t panels = product_of(stage).panels(), count = pieces(stage);
        return {panels * piece / count, panels * (piece + 1) / count};
    }

    // Weights that thread `t` reads behind those of a piece: of the same product, or of the next one.
    template <class T> const u32* behind(size_t stage, int t, i64 next) const {
        if (next < 0) {
            do
                if (++stage == stages.size()) return nullptr;
            while (!product_of(stage).linear || !rows_of(stage));
            const size_t count = pieces(stage), shares = Stage::shares(count, m.threads);
            next = count * (t * shares / m.threads) / shares;
        }
        const Product product = product_of(stage);
        const i64 form = product.linear->form;
        if (form == NIBBLES || form == BYTES) return nullptr;  // which are fetched as they are unpacked
        const size_t k = form == W8A8 ? padded_inputs(product.inner, W8A8) / 4 : product.inner / T::per;
        return reinterpret_cast<const u32*>(product.linear->weight) + panels_of(stage, next).from * PANEL * k;
    }

    const Layer* layer_of(size_t stage) const {
        const size_t index = (stage - BEFORE) / PER_LAYER;
        return index < layers.size() ? &layers[index] : nullptr;
    }

    // Some rows of a product and some panels of its columns.
    struct Part {
        Range rows, panels;
        const Input& input;
        Later& later;
        const u32* behind;  // weights that are read next, or null
    };
    Part across(size_t columns, Range rows, Scratch& own) const {
        return {rows, {0, padded(columns, PANEL) / PANEL}, input, own.later, nullptr};
    }

    size_t scores_stride(size_t length) const { return padded(length, m.block_size) + 2 * W; }

    template <class T> void compute(int t, u32 step) {
        const auto run = [&](size_t from, size_t to) {
            for (size_t i = from; i < to; i++)
                if (!stages[i].run(step, t, m.threads, [&](size_t piece, i64 next) { work_on<T>(t, i, piece, next); }))
                    return false;
            return true;
        };
        if (!in_strips.load(std::memory_order_relaxed)) {
            run(0, stages.size());
        } else if (run(0, BEFORE) &&
                   strips.run(step, t, m.threads, 2 * (u32)layers.size(), [&](size_t strip, u32 done) {
                       done % 2 ? finish_layer<T>(t, strip, done / 2) : begin_layer<T>(t, strip, done / 2);
                   })) {
            run(behind_strips(), stages.size());
        }
    }

    // Has the products to come fetch these of `blocks_read` for the attention of layer `index`.
    template <class T> void fetch_later(Scratch& own, size_t index, size_t from, size_t to) {
        if (index == layers.size() || layers[index].window) return own.later.begin(nullptr, 1, nullptr, 0);
        own.later.begin(m.kv + tile_at<T>(index, 0, 0), m.kv_heads * 2 * tile_units(T::per) / LINE,
                        blocks_read.data() + from, to - from);
    }

    // A layer of a strip up to its K and V.
    template <class T> void begin_layer(int t, size_t strip, size_t index) {
        const Layer& layer = layers[index];
        const Range rows = strip_rows(strip);
        Scratch& own = scratch[t];
        if (index == 0) fetch_later<T>(own, 0, strip_blocks[strip], strip_blocks[strip + 1]);
        prepare_input<T>(own, first_stage(index) + (QKV - NORM), rows, input);
        project_qkv<T>(layer, across(qkv_columns(), rows, own));
        place<T>(rows, index);
    }

    // The rest of it; of the last layer its attention alone.
    template <class T> void finish_layer(int t, size_t strip, size_t index) {
        const Layer& layer = layers[index];
        Scratch& own = scratch[t];
        for (size_t i = strip_tiles[strip]; i < strip_tiles[strip + 1]; i++)
            for (i64 head = 0; head < m.kv_heads; head++) attend<T>(own, index, tiles[i], head);
        if (index + 1 == layers.size()) return;
        fetch_later<T>(own, index + 1, strip_blocks[strip], strip_blocks[strip + 1]);
        const Range rows = strip_rows(strip);
        const size_t heads = m.heads * m.head_dim;
        prepare_input<T>(own, first_stage(index) + (OUTPUT - NORM), rows, input);
        add_product<T>(layer.output, attended.as<u32>(), heads, heads, across(m.hidden, rows, own));
        prepare_input<T>(own, first_stage(index) + (GATE - NORM), rows, input);
        gate<T>(layer, across(gate_columns(), rows, own));
        prepare_input<T>(own, first_stage(index) + (DOWN - NORM), rows, input);
        add_product<T>(layer.down, gated.as<u32>(), ld_gated, m.intermediate, across(m.hidden, rows, own));
    }

    template <class T> void work_on(int t, size_t stage, size_t piece, i64 next) {
        const size_t n = rows_of(stage), count = pieces(stage), index = (stage - BEFORE) / PER_LAYER;
        const Range some{n * piece / count, n * (piece + 1) / count};
        const Layer* layer = layer_of(stage);
        const size_t heads = m.heads * m.head_dim;
        Scratch& own = scratch[t];
        const auto part = [&] {
            if (own.prepared != stage) begin_product<T>(t, stage);
            const Input& rows = small ? own.input : input;
            return Part{{0, n}, panels_of(stage, piece), rows, own.later, behind<T>(stage, t, next)};
        };
        switch (kind(stage)) {
            case COPY: return copy<T>(piece);
            case EMBED: return embed<T>(some);
            case NORM: case ROUND_ATTENDED: case POST_NORM: case ROUND_GATED: case LAST_NORM:
                return prepare_input<T>(own, stage + 1, some, input);
            case QKV: return project_qkv<T>(*layer, part());
            case PLACE: return place<T>(some, index);
            case ATTEND: {
                const Tile& tile = tiles[piece / m.kv_heads];
                const size_t kv_head = piece % m.kv_heads;
                if (apart) place_group<T>(index, tile.first, kv_head);
                return attend<T>(own, index, tile, kv_head);
            }
            case COMPACT: return compact<T>(layer->output.form);
            case OUTPUT: return add_product<T>(layer->output, attended.as<u32>(), heads, heads, part());
            case GATE: return gate<T>(*layer, part());
            case DOWN: return add_product<T>(layer->down, gated.as<u32>(), ld_gated, m.intermediate, part());
            case HEAD: return choose<T>(own, part());
            case DRAW: return draw(t, piece);
        }
    }

    // What a thread does first in the stage of a product.
    template <class T> void begin_product(int t, size_t stage) {
        Scratch& own = scratch[t];
        own.prepared = stage;
        const size_t index = (stage - BEFORE) / PER_LAYER;
        const bool first = kind(stage) == QKV && index == 0;
        if (first || kind(stage) == OUTPUT) {
            const size_t all = blocks_read.size();
            fetch_later<T>(own, first ? 0 : index + 1, all * t / m.threads, all * (t + 1) / m.threads);
        }
        if (small) prepare_input<T>(own, stage, {0, rows_of(stage)}, own.input);
    }

    // Some rows of the input of the product of `stage`.
    template <class T> void prepare_input(Scratch& own, size_t stage, Range rows, Input& to) {
        const Layer* layer = layer_of(stage);
        const size_t heads = m.heads * m.head_dim;
        const i64 form = product_of(stage).linear->form;
        switch (kind(stage)) {
            case QKV: return normalise<T>(own, rows, layer->input_norm, form, to);
            case GATE: return normalise<T>(own, rows, layer->post_norm, form, to);
            case HEAD: return normalise<T>(own, rows, m.norm, form, to);
            case OUTPUT:
                if (form != UNITS) round(own, rows, attended.as<float>(), heads, heads, form, to);
                return;
            case DOWN:
                if (form != UNITS) round(own, rows, gated.as<float>(), ld_gated, m.intermediate, form, to);
                return;
            default: return;
        }
    }

    void draw(int t, size_t index) {
        const Draw& draw = s.drawn[index];
        const float* row = s.logits + draw.row * m.vocab;
        s.picked[index] = scratch[t].candidates.pick(row, m.vocab, draw, s.positions[index] + (i32)s.ahead);
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
    template <class T>
    void normalise(const Scratch& own, Range rows, const float* weight, i64 form, const Input& input) {
        for (size_t i = rows.from; i < rows.to; i++) {
            const float* x = residual.as<float>() + i * ld_hidden;
            u32* to = input.units.as<u32>() + i * ld_hidden / T::per;
            const float factor = inverse_rms(x, ld_hidden, m.hidden);
            if (form == UNITS) {
                for (size_t h = 0; h < ld_hidden; h += W)
                    T::put(to, h, load<vf>(x + h) * factor * load<vf>(weight + h));
                continue;
            }
            float* row = own.row.as<float>();
            for (size_t h = 0; h < ld_hidden; h += W)
                store(row + h, load<vf>(x + h) * factor * load<vf>(weight + h));
            keep_integers(i, row, m.hidden, form, input);
        }
    }

    // Rows of input as integers, for quantised weights.
    void round(const Scratch& own, Range rows, const float* x, size_t ldx, size_t n, i64 form, const Input& input) {
        float* row = own.row.as<float>();
        for (size_t i = rows.from; i < rows.to; i++) {
            std::memcpy(row, x + i * ldx, n * 4);
            keep_integers(i, row, n, form, input);
        }
    }

    // `x` has room for padding.
    void keep_integers(size_t row, float* x, size_t n, i64 form, const Input& input) {
        const size_t all = padded_inputs(n, form);
        for (size_t i = n; i < all; i++) x[i] = 0;
        u32* to = input.integers.as<u32>() + row * ld_integers;
        u32* own = input.sums.as<u32>() + row * (ld_integers / PAIRS);
        float& worth = input.worths.as<float>()[row];
        worth = form == W8A8 ? to_octets(x, all, to, own) : to_integers(x, all, form == NIBBLES, to, own);
    }

    float inverse_rms(const float* x, size_t n, size_t count) const {
        vf squares = {};
        for (size_t i = 0; i < n; i += W) squares += load<vf>(x + i) * load<vf>(x + i);
        return 1.0f / std::sqrt(sum(squares) / (float)count + (float)m.epsilon);
    }

    // store_tile(row, first column, values of a panel) for a part of x . weight. Quantised weights take what
    // the part's input holds instead of x.
    template <class T, class Store>
    void multiply(const Part& part, const Linear& linear, size_t inner, const u32* x, size_t ldx,
                  const Store& store_tile) {
        if constexpr (T::per == 2) {
            if (linear.form == W8A8) return multiply_octets(part, linear, inner, store_tile);
            if (linear.form != UNITS) return multiply_quantised(part, linear, inner, store_tile);
        }
        multiply_units<T>(part, linear, inner / T::per, x, ldx, store_tile);
    }

    template <class Store>
    void multiply_octets(const Part& part, const Linear& linear, size_t inner, const Store& store_tile) {
        multiply_units<Octets>(
            part, linear, padded_inputs(inner, W8A8) / 4, part.input.integers.as<u32>(), ld_integers,
            [&](size_t row, size_t column, float* values) {
                const i32 begin = part.input.sums.as<i32>()[row * (ld_integers / PAIRS)];
                const float worth = part.input.worths.as<float>()[row];
                for (int v = 0; v < PANEL; v += W)
                    store(values + v, __builtin_convertvector(load<vi>(values + v) + begin, vf) *
                                          (load<vf>(linear.scales + column + v) * worth));
                store_tile(row, column, values);
            });
    }

    // Of units as T has them, k of them in a row.
    template <class T, class Store>
    void multiply_units(const Part& part, const Linear& linear, size_t k, const u32* x, size_t ldx,
                        const Store& store_tile) {
        const u32* weight = reinterpret_cast<const u32*>(linear.weight);
        constexpr size_t SOME = 240;  // rows whose input stays in the cache beside a panel of weights
        const size_t lines = k * PANEL / LINE;
        alignas(64) float out[ROWS * PANEL];
        for (size_t base = part.rows.from; base < part.rows.to; base += SOME) {
            const size_t rows = std::min(SOME, part.rows.to - base);
            for (size_t panel = part.panels.from; panel < part.panels.to; panel++) {
                const u32* w = weight + panel * PANEL * k;
                const u32* next = panel + 1 < part.panels.to ? w + PANEL * k : part.behind;
                const bool fetches = next && rows > STREAMED;
                size_t fetched = 0, tiles_left = (rows + ROWS - 1) / ROWS;  // each tile of rows fetches as much
                tiles_of(rows, [&](size_t first, int count) {
                    const size_t row = base + first, some = (lines - fetched) / tiles_left--;
                    const Lines share = fetches ? Lines{next + fetched * LINE, some} : Lines{};
                    fetched += some;
                    with_rows(count, [&](auto R) {
                        product<T, R.value>(w, x + row * ldx, ldx, k, out, share, part.later);
                    });
                    for (int r = 0; r < count; r++) store_tile(row + r, panel * PANEL, out + r * PANEL);
                });
            }
        }
    }

    template <class Store>
    void multiply_quantised(const Part& part, const Linear& linear, size_t inner, const Store& store_tile) {
        constexpr size_t SOME = 240;  // rows whose sums stay in the cache
        const size_t groups = (inner + GROUP - 1) / GROUP, all = part.rows.to - part.rows.from;
        const size_t parts = (all + SOME - 1) / SOME;
        alignas(64) float out[SOME * PANEL];
        for (size_t panel = part.panels.from; panel < part.panels.to; panel++)
            for (size_t p = 0; p < parts; p++) {
                const size_t base = part.rows.from + all * p / parts;
                const size_t rows = part.rows.from + all * (p + 1) / parts - base;
                const Input& input = part.input;
                if (linear.form == NIBBLES)
                    multiply_panel<Nibbles>(linear.weight, panel, groups, input, base, rows, out, part.later);
                else multiply_panel<Bytes>(linear.weight, panel, groups, input, base, rows, out, part.later);
                for (size_t r = 0; r < rows; r++) {
                    float* own = out + r * PANEL;
                    for (int v = 0; v < PANEL; v += W)
                        store(own + v, load<vf>(own + v) * part.input.worths.as<float>()[base + r]);
                    store_tile(base + r, panel * PANEL, own);
                }
            }
    }

    // out[row][v], in parts of what the row's integers are worth.
    template <class Q>
    void multiply_panel(const u8* weight, size_t index, size_t groups, const Input& from, size_t base, size_t rows,
                        float* out, Later& later) const {
        constexpr size_t FEW = 2 * ROWS;  // rows for which unpacking once and for all does not pay
        const u8* panel = weight + index * groups * Q::bytes;
        const auto input = [&](size_t first) {
            const size_t row = base + first;
            return Integers{from.integers.as<u32>() + row * ld_integers,
                            from.sums.as<u32>() + row * (ld_integers / PAIRS), ld_integers};
        };
        std::memset(out, 0, rows * PANEL * 4);
        if (rows <= FEW) {
            tiles_of(rows, [&](size_t first, int count) {
                with_rows(count, [&](auto R) {
                    add_stored<Q, R.value>(out + first * PANEL, panel, input(first), groups, later);
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
                        add_unpacked<Q, R.value>(out + first * PANEL, unpacked, input(first), g, later);
                });
            });
        }
    }

    static INLINE vf biased(const float* values, const float* bias) {
        return bias ? load<vf>(values) + load<vf>(bias) : load<vf>(values);
    }

    template <class T> void project_qkv(const Layer& layer, const Part& part) {
        multiply<T>(part, layer.qkv, m.hidden, part.input.units.as<u32>(), ld_hidden / T::per,
                    [&](size_t row, size_t column, const float* values) {
                        float* to = projected.as<float>() + row * ld_qkv + column;
                        const float* bias = layer.qkv.bias;
                        for (int v = 0; v < PANEL; v += W)
                            store(to + v, biased(values + v, bias ? bias + column + v : nullptr));
                    });
    }

    // residual += x . weight + bias.
    template <class T>
    void add_product(const Linear& linear, const u32* x, size_t ldx, size_t inner, const Part& part) {
        multiply<T>(part, linear, inner, x, ldx / T::per,
                    [&](size_t row, size_t column, const float* values) {
                        float* to = residual.as<float>() + row * ld_hidden + column;
                        const float* bias = linear.bias;
                        for (int v = 0; v < PANEL; v += W)
                            store(to + v, load<vf>(to + v) + biased(values + v, bias ? bias + column + v : nullptr));
                    });
    }

    // silu(gate) * up; columns come as vectors of gate and up in turn.
    template <class T> void gate(const Layer& layer, const Part& part) {
        multiply<T>(part, layer.gate_up, m.hidden, part.input.units.as<u32>(), ld_hidden / T::per,
                    [&](size_t row, size_t column, const float* values) {
                        u32* to = gated.as<u32>() + row * ld_gated / T::per;
                        float* exact = gated.as<float>() + row * ld_gated;
                        const bool rounds = layer.down.form != UNITS;
                        const float* bias = layer.gate_up.bias ? layer.gate_up.bias + column : nullptr;
                        const vf x = biased(values, bias), up = biased(values + W, bias ? bias + W : nullptr);
                        const vf value = x / (1.0f + T::exp(-x)) * up;
                        if (rounds) store(exact + column / 2, value);
                        else T::put(to, column / 2, value);
                    });
    }

    // Norm and rotation of q and k; q to `queries`, k and v to their slots.
    template <class T> void place(Range tokens, size_t index) {
        for (size_t token = tokens.from; token < tokens.to; token++)
            for (i64 h = 0; h < m.heads + 2 * m.kv_heads; h++) place_head<T>(index, token, h);
    }

    // The same of one token and what one KV head needs.
    template <class T> void place_group(size_t index, size_t token, size_t kv_head) {
        for (size_t h = 0; h < group(); h++) place_head<T>(index, token, kv_head * group() + h);
        place_head<T>(index, token, m.heads + kv_head);
        place_head<T>(index, token, m.heads + m.kv_heads + kv_head);
    }

    template <class T> void place_head(size_t index, size_t token, size_t h) {
        const Layer& layer = layers[index];
        const size_t head = m.head_dim;
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
            return;
        }
        const i32* table = s.tables[owners.as<i32>()[token]];
        const size_t slot = position % m.block_size, kv_head = (h - m.heads) % m.kv_heads;
        u32* tile = m.kv + tile_at<T>(index, table[position / m.block_size], kv_head);
        alignas(64) u32 units[MOST_HEAD];
        for (size_t d = 0; d < head; d += W) T::put(units, d, load<vf>(x + d));
        if (!is_value) {
            for (size_t d = 0; d < head / T::per; d++) tile[d * m.block_size + slot] = units[d];
            return;
        }
        tile += tile_units(T::per);
        if constexpr (T::per == 1) {
            std::memcpy(tile + slot * head, units, head * 4);
        } else {
            u16* to = reinterpret_cast<u16*>(tile + slot / 2 * head) + slot % 2;
            for (size_t d = 0; d < head; d += W) put_alternate(to + 2 * d, reinterpret_cast<const u16*>(units) + d);
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
    void attend(const Scratch& own, size_t index, const Tile& tile, size_t kv_head) {
        if (index + 1 == layers.size() && !tile.sampled) return;
        const Layer& layer = layers[index];
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
            std::ptrdiff_t ahead[2], soon[2];
            for (int i = 0; i < 2; i++) {
                const int at = std::min(first + i, blocks * each - 1), b = at / each, key = at % each * W;
                // Blocks lie anywhere, so the hardware cannot see the next one coming. V follows.
                const auto behind = [&](int count) {
                    const int next = b + count;
                    return (next < blocks ? keys[next] : values[std::min(next - blocks, blocks - 1)]) - keys[b];
                };
                vectors[i] = keys[b] + key;
                ahead[i] = behind(AHEAD), soon[i] = behind(SOON);
                to[i] = scores + b * size + key;
            }
            // A vector may reach past its block: what the next one writes comes later.
            tiles_of(rows, [&](size_t row, int count) {
                float* const here[2] = {to[0] + row * stride, to[1] + row * stride};
                with_rows(count, [&](auto R) {
                    score<T, R.value>(vectors, size, q + row * units, units, here, stride, ahead, soon);
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
        const auto kept = [&](int i, vf x, vf other) {
            if (i >= from && i + W <= to) return x;
            return (lane + i >= from) & (lane + i < to) ? x : other;
        };
        vf most = never;
        for (int i = from / W * W; i < to; i += W) {
            const vf x = kept(i, load<vf>(scores + i), never);
            most = x > most ? x : most;
        }
        const float scale = (float)m.scale, peak = greatest(most) * scale;
        vf total = {};
        u32* weights = reinterpret_cast<u32*>(scores);
        for (int i = 0; i < end; i += W) {
            const vf weight = kept(i, T::exp(load<vf>(scores + i) * scale - peak), vf{});
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
    template <class T> void choose(const Scratch& own, const Part& part) {
        const size_t vocab = m.vocab;
        vf* best = own.best.as<vf>();
        vi* where = own.where(s.outputs);
        vf* faults = own.faults(s.outputs);
        const vi lane = lanes();
        multiply<T>(part, m.head, m.hidden, part.input.units.as<u32>(), ld_hidden / T::per,
                    [&](size_t row, size_t column, const float* values) {
                        if (s.kept[row] >= 0) {
                            const size_t count = std::min<size_t>(PANEL, vocab - column);
                            std::memcpy(s.logits + s.kept[row] * vocab + column, values, count * 4);
                        }
                        for (int v = 0; v < PANEL; v += W) {
                            const vi id = lane + (i32)(column + v);
                            const vf x = load<vf>(values + v);
                            faults[row] += x * 0.0f;  // columns of padding are 0
                            // Panels come in any order: the first of equal logits is not the one seen first.
                            const vi before = (x > best[row]) | ((x == best[row]) & (id < where[row]));
                            const vi better = before & (id < (i32)vocab);
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
PUBLIC i32 pk_pick(const float* logits, i64 vocab, const Draw* draws, const i32* positions, i64 count,
                   i32* picked) {
    try {
        Candidates candidates;
        candidates.reserve(vocab);
        for (i64 i = 0; i < count; i++)
            picked[i] = candidates.pick(logits + draws[i].row * vocab, vocab, draws[i], positions[i]);
        return 0;
    } catch (...) {
        return 1;
    }
}

PUBLIC void pk_stop(void* engine) { delete static_cast<Engine*>(engine); }
}

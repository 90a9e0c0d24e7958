// The layers and the head of a decoder over rows of any sequences, each call on all threads of a pool.
//
// Structures are those of library.py. The residual stream is float32.

#include "adapters.h"

using namespace legato;

namespace {

struct Layer {
    Norm norm, next_norm, query_norm, key_norm;
    Linear qkv, out, up, down;
};

// `parallel`: attention and MLP read one norm; `gated`: `up` has two halves.
struct Decoder {
    const Layer* layers;
    const float* cosines;
    const float* sines;
    int32_t num_layers, dim, inner, heads, key_heads, half_rotary, gated, parallel;
};

// Row r has position `positions[r]` of the sequence with the pages `tables + r * table_stride`, and
// sees its first `lengths[r]` positions; 0: the row is padding. Each `tile` rows are of one sequence.
// Without keys in `pages` the rows are the positions of one sequence, and nothing is cached.
// `cosines` and `sines` are each row's; null: those of its position.
struct Step {
    float* x;
    const int64_t* positions;
    const int64_t* lengths;
    const int64_t* tables;
    const float* cosines;
    const float* sines;
    int64_t rows, table_stride, tile;
    Pages pages;  // of the first layer
    int64_t layer_bytes;
    int32_t caches_only;  // whether the last layer ends with its keys and values
    Adapters adapters;
};

class Run {
   public:
    Run(Thread& thread, const Decoder& decoder, const Step& step)
        : thread_(thread), pool_(thread.pool), decoder_(decoder), step_(step) {
        dims_ = step.pages.dims;
        queries_ = long(decoder.heads) * dims_;
        fused_ = queries_ + 2L * decoder.key_heads * dims_;
    }

    // Grow what threads share, before any runs.
    static void reserve(Pool& pool, const Decoder& decoder, const Step& step) {
        const long rows = step.rows, queries = long(decoder.heads) * step.pages.dims;
        Prepared(pool.normed, rows, std::max<long>(decoder.dim, queries));
        Prepared(pool.active, rows, decoder.inner);
        pool.qkv.room<float>(rows * (queries + 2L * decoder.key_heads * step.pages.dims));
        pool.up.room<float>(rows * decoder.inner * (decoder.gated ? 2 : 1));
        pool.heads.room<float>(rows * queries);
    }

    void layers() {
        for (int index = 0; index < decoder_.num_layers; ++index) {
            bool last = index + 1 == decoder_.num_layers;
            layer(decoder_.layers[index], index, last && step_.caches_only);
        }
    }

   private:
    void layer(const Layer& layer, int index, bool caches_only) {
        const long rows = step_.rows;
        const Adapters& adapters = step_.adapters;
        Pages pages = step_.pages;
        const bool parallel = decoder_.parallel && !caches_only;
        Prepared normed(pool_.normed, rows, decoder_.dim);
        float* qkv = pool_.qkv.room<float>(rows * fused_);
        if (pages.keys == nullptr) {
            pages.keys = qkv + queries_;
            pages.values = qkv + queries_ + long(decoder_.key_heads) * dims_;
        } else {
            pages.keys = static_cast<char*>(pages.keys) + index * step_.layer_bytes;
            pages.values = static_cast<char*>(pages.values) + index * step_.layer_bytes;
        }
        float* up = pool_.up.room<float>(rows * layer.up.outputs);
        float* heads = pool_.heads.room<float>(rows * queries_);

        norm(layer.norm, normed, layer.qkv.rounding() | layer.up.rounding());
        multiply(layer.qkv, normed, {qkv, fused_, false}, parallel ? &layer.up : nullptr,
                 {up, layer.up.outputs, false});
        pool_.share(rows, [&](long row) {
            adapt_row(adapters.qkv, index, row, normed.row(row), qkv + row * fused_);
            place(layer, pages, qkv + row * fused_, row);
        });
        if (caches_only) return;
        attend_all(pages, qkv, heads);
        Prepared seen(pool_.normed, rows, queries_, heads, queries_);
        Prepared active(pool_.active, rows, decoder_.inner);
        if (parallel || layer.out.rounding() != 0) {
            pool_.share(rows, [&](long row) {
                seen.round(row, layer.out.rounding());
                if (!parallel) return;
                adapt_row(adapters.up, index, row, normed.row(row), up + row * layer.up.outputs);
                activate_row(layer, up, active, row);
            });
        }
        multiply(layer.out, seen, {step_.x, decoder_.dim, true});
        if (!parallel) {
            adapt_out(index, heads);
            Prepared again(pool_.normed, rows, decoder_.dim);
            norm(layer.next_norm, again, layer.up.rounding());
            multiply(layer.up, again, {up, layer.up.outputs, false});
            pool_.share(rows, [&](long row) {
                adapt_row(adapters.up, index, row, again.row(row), up + row * layer.up.outputs);
                activate_row(layer, up, active, row);
            });
        }
        multiply(layer.down, active, {step_.x, decoder_.dim, true});
        if (parallel) adapt_out(index, heads);
        if (adapters.slots == nullptr) return;
        pool_.share(rows, [&](long row) {
            adapt_row(adapters.down, index, row, active.row(row), step_.x + row * decoder_.dim);
        });
    }

    void adapt_out(int layer, const float* heads) {
        if (step_.adapters.out.parts[0].a == nullptr) return;
        pool_.share(step_.rows, [&](long row) {
            adapt_row(step_.adapters.out, layer, row, heads + row * queries_, step_.x + row * decoder_.dim);
        });
    }

    void adapt_row(const LowRanks& map, int layer, long row, const float* x, float* to) {
        if (step_.adapters.slots != nullptr) adapt(thread_, step_.adapters, map, layer, row, x, to);
    }

    void norm(const Norm& norm, const Prepared& to, int rounding) {
        pool_.share(step_.rows, [&](long row) {
            norm_row(norm, step_.x + row * decoder_.dim, decoder_.dim, to.row(row));
            to.round(row, rounding);
        });
    }

    void multiply(const Linear& w, const Prepared& x, const Outputs& out, const Linear* also = nullptr,
                  const Outputs& also_out = {}) {
        Product first(w, x.inputs(), step_.rows, out, pool_.size());
        if (also == nullptr) {
            pool_.share(first.count(), [&](long task) { first(thread_, task); });
            return;
        }
        Product second(*also, x.inputs(), step_.rows, also_out, pool_.size());
        pool_.share(first.count() + second.count(), [&](long task) {
            if (task < first.count()) first(thread_, task);
            else second(thread_, task - first.count());
        });
    }

    void activate_row(const Layer& layer, const float* up, const Prepared& to, long row) {
        activate(up + row * layer.up.outputs, decoder_.inner, decoder_.gated, to.row(row));
        to.round(row, layer.down.rounding());
    }

    // Norm and rotate a row's queries and keys, and write its keys and values to their page.
    void place(const Layer& layer, const Pages& pages, float* qkv, long row) {
        if (step_.lengths[row] == 0) return;
        long position = step_.positions[row];
        const int half = decoder_.half_rotary, heads = decoder_.heads, keys = decoder_.key_heads;
        const int64_t* table = step_.tables + row * step_.table_stride;
        const bool own = step_.cosines != nullptr;
        const float* cosine = own ? step_.cosines + row * half : decoder_.cosines + position * half;
        const float* sine = own ? step_.sines + row * half : decoder_.sines + position * half;
        for (int head = 0; head < heads + keys; ++head) {
            float* at = qkv + long(head) * dims_;
            const Norm& norm = head < heads ? layer.query_norm : layer.key_norm;
            if (norm.weight != nullptr) norm_row(norm, at, dims_, at);
            rotate(at, cosine, sine, half);
        }
        for (int head = 0; head < keys && step_.pages.keys != nullptr; ++head) {
            long at = pages.at(table, position, head);
            keep(pages.keys, pages.bf16, at, qkv + long(heads + head) * dims_, dims_);
            keep(pages.values, pages.bf16, at, qkv + long(heads + keys + head) * dims_, dims_);
        }
    }

    void attend_all(const Pages& pages, const float* qkv, float* out) {
        const int keys = decoder_.key_heads, group = decoder_.heads / keys;
        const long tiles = (step_.rows + step_.tile - 1) / step_.tile;
        pool_.share(tiles * keys, [&](long task) {
            long row = task / keys * step_.tile;
            int key_head = int(task % keys), count = int(std::min<long>(step_.tile, step_.rows - row));
            long column = long(key_head) * group * dims_;
            Tile tile{step_.tables + row * step_.table_stride,
                      qkv + row * fused_ + column,
                      out + row * queries_ + column,
                      fused_,
                      queries_,
                      step_.lengths + row,
                      count,
                      group,
                      key_head};
            attend(thread_, pages, tile);
        });
    }

    Thread& thread_;
    Pool& pool_;
    const Decoder& decoder_;
    const Step& step_;
    long dims_, queries_, fused_;
};

}  // namespace

extern "C" {

// What the products use.
const char* legato_instructions() { return INSTRUCTIONS; }

// It lasts as long as the process.
Pool* legato_pool(int32_t threads) { return new Pool(threads); }

int64_t legato_packed_bytes(const Linear* linear) { return linear->panels() * linear->panel_bytes(); }

// Fill memory of `legato_packed_bytes` from values that are float32, or bfloat16 with `bf16`.
void legato_pack(Pool* pool, const Linear* linear, const void* values, int32_t bf16, uint8_t* data) {
    Plain plain{values, bf16 != 0, linear->inputs, linear->outputs};
    pool->run([] {}, [&](Thread&) {
        pool->share(linear->panels(), [&](long panel) { pack_panel(plain, *linear, panel, data); });
    });
}

// The same of codes, for a kind of integers.
void legato_pack_codes(Pool* pool, const Linear* linear, const Coded* codes, uint8_t* data) {
    pool->run([] {}, [&](Thread&) {
        pool->share(linear->panels(), [&](long panel) { pack_blocks(*codes, *linear, panel, data); });
    });
}

void legato_unpack(const Linear* linear, const int64_t* outputs, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) unpack_row(*linear, outputs[i], to + i * linear->inputs);
}

// Multiply contiguous rows.
void legato_multiply(Pool* pool, const Linear* linear, const float* x, int64_t rows, float* out) {
    const long width = linear->inputs;
    pool->run([&] { Prepared(pool->normed, rows, width); }, [&](Thread& thread) {
        Prepared inputs(pool->normed, rows, width, x, width);
        if (const int rounding = linear->rounding())
            pool->share(rows, [&](long row) { inputs.round(row, rounding); });
        Product product(*linear, inputs.inputs(), rows, {out, linear->outputs, false}, pool->size());
        pool->share(product.count(), [&](long task) { product(thread, task); });
    });
}

void legato_layers(Pool* pool, const Decoder* decoder, const Step* step) {
    pool->run([&] { Run::reserve(*pool, *decoder, *step); },
              [&](Thread& thread) { Run(thread, *decoder, *step).layers(); });
}

}  // extern "C"

// Prints what the kernels compute of made-up numbers, as hashes of all bits: the same on any processor.
//
// Compiled together with the kernels' sources, for this machine or another.

#include "decoder.cpp"

#include <cstdio>
#include <string>

namespace {

class Numbers {
   public:
    explicit Numbers(uint64_t seed) : state_(seed * 2 + 1) {}

    uint32_t bits() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state_ >> 33);
    }

    // From -1 to 1, and now and then far larger.
    float next() {
        float value = float(bits() % 2000001) / 1e6f - 1.0f;
        return bits() % 50 == 0 ? value * 20.0f : value;
    }

    std::vector<float> floats(size_t count, float factor = 1.0f) {
        std::vector<float> values(count);
        for (float& value : values) value = next() * factor;
        return values;
    }

   private:
    uint64_t state_;
};

class Hash {
   public:
    void take(const float* values, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, values + i, sizeof bits);
            if (values[i] != values[i]) bits = 0x7fc00000;  // whose sign differs between processors
            for (int byte = 0; byte < 4; ++byte) hash_ = (hash_ ^ (bits >> 8 * byte & 255)) * 1099511628211u;
        }
    }
    unsigned long long value() const { return hash_; }

   private:
    uint64_t hash_ = 14695981039346656037u;
};

void print(const std::string& name, const std::vector<float>& values) {
    Hash hash;
    hash.take(values.data(), values.size());
    std::printf("%-60s %016llx %.6g\n", name.c_str(), hash.value(), values[values.size() / 2]);
}

const char* const KINDS[] = {"float32", "bfloat16", "int8", "int4", nullptr, nullptr, "int8_single", "int4_single"};

std::vector<Pool*>& pools() {
    static std::vector<Pool*> made;
    if (made.empty())
        for (int threads : {1, 2, 3}) made.push_back(legato_pool(threads));
    return made;
}

// A packed weight, whose memory stays.
Linear packed(int kind, int inputs, int outputs, Numbers& numbers, bool biased = true) {
    Linear linear{nullptr, nullptr, kind, inputs, outputs};
    size_t size = (legato_packed_bytes(&linear) + 63) / 64 * 64;
    auto* data = static_cast<uint8_t*>(std::aligned_alloc(64, size));
    std::memset(data, 0, size);
    std::vector<float> values = numbers.floats(size_t(inputs) * outputs, 0.2f);
    legato_pack(pools()[0], &linear, values.data(), 0, data);
    linear.data = data;
    if (biased) linear.bias = (new std::vector<float>(numbers.floats(outputs)))->data();
    return linear;
}

void products(int kind, int inputs, int outputs) {
    Numbers numbers(kind * 1000 + inputs);
    const int most = 150;
    Linear linear = packed(kind, inputs, outputs, numbers);
    std::vector<float> x = numbers.floats(size_t(most) * inputs);
    x[5L * inputs + inputs / 2] = std::numeric_limits<float>::quiet_NaN();
    x[6L * inputs] = -std::numeric_limits<float>::infinity();
    std::fill_n(x.begin() + 7L * inputs, inputs, 0.0f);
    std::string shape = std::string(KINDS[kind]) + " " + std::to_string(inputs) + " to " + std::to_string(outputs);
    std::vector<int64_t> all(outputs);
    for (int i = 0; i < outputs; ++i) all[i] = i;
    std::vector<float> weights(size_t(inputs) * outputs);
    legato_unpack(&linear, all.data(), outputs, weights.data());
    print(shape + ", weights", weights);
    for (int rows : {1, 2, 3, 4, 5, 6, 7, 13, most}) {
        std::vector<float> out(size_t(rows) * outputs);
        legato_multiply(pools()[rows % 3], &linear, x.data() + (most - rows) * inputs, rows, out.data());
        print(shape + ", rows " + std::to_string(rows), out);
    }
}

struct Form {
    const char* name;
    int kind, heads, key_heads, head_dim, rotary;
    bool gated, normed_heads, narrow_cache, adapted;
};

constexpr int DIM = 50, INNER = 70, LAYERS = 2, PAGES = 40, SLOTS = 6, RANKS = 5;

class Model {
   public:
    explicit Model(const Form& form) : form_(form), numbers_(form.kind + form.heads) {
        const int fused = (form.heads + 2 * form.key_heads) * form.head_dim;
        for (int i = 0; i < LAYERS; ++i) {
            Norm none{nullptr, nullptr, 0.0f};
            layers_.push_back({norm(DIM, !form.gated), form.gated ? norm(DIM, false) : none,
                               form.normed_heads ? norm(form.head_dim, false) : none,
                               form.normed_heads ? norm(form.head_dim, false) : none,
                               packed(form.kind, DIM, fused, numbers_),
                               packed(form.kind, form.heads * form.head_dim, DIM, numbers_),
                               packed(form.kind, DIM, INNER * (form.gated ? 2 : 1), numbers_),
                               packed(form.kind, INNER, DIM, numbers_)});
        }
        cosines_ = numbers_.floats(size_t(PAGES) * SLOTS * form.rotary / 2);
        sines_ = numbers_.floats(size_t(PAGES) * SLOTS * form.rotary / 2);
        decoder_ = {layers_.data(), cosines_.data(), sines_.data(), LAYERS, DIM, INNER,
                    form.heads, form.key_heads, form.rotary / 2, form.gated, !form.gated};
        if (form.adapted) adapt();
        x_ = numbers_.floats(size_t(90) * DIM);
        keys_.resize(size_t(LAYERS) * PAGES * form.key_heads * SLOTS * form.head_dim);
        values_ = keys_;
        for (int i = 0; i < PAGES; ++i) table_.push_back((i * 7 + 3) % PAGES);
    }

    // A prompt in chunks of `chunk` rows, then three single rows; with `whole` all see all.
    std::vector<float> run(Pool* pool, int chunk, bool whole) {
        std::vector<float> x = x_;
        for (int first = 0; first < 90; first += chunk) {
            if (first >= 87) chunk = 1;
            step(pool, x.data() + first * DIM, first, std::min(chunk, 90 - first), whole);
        }
        return x;
    }

   private:
    void step(Pool* pool, float* x, int first, int rows, bool whole) {
        std::vector<int64_t> positions, lengths;
        for (int i = first; i < first + rows; ++i) {
            positions.push_back(i);
            lengths.push_back(whole ? 90 : i + 1);
        }
        const int64_t slot = form_.head_dim, head = slot * SLOTS, page = head * form_.key_heads;
        const int64_t bytes = form_.narrow_cache ? 2 : 4;
        Pages pages{keys_.data(), values_.data(), page, head, slot, form_.narrow_cache, SLOTS, form_.head_dim};
        Step step{x, positions.data(), lengths.data(), table_.data(), nullptr, nullptr, rows, 0, 8, pages,
                  page * PAGES * bytes, 0, adapters_};
        legato_layers(pool, &decoder_, &step);
    }

    // Adapt queries, keys and values, the output, both halves of what is gated, and the rest.
    void adapt() {
        const int queries = form_.heads * form_.head_dim, keys = form_.key_heads * form_.head_dim;
        adapters_ = {{low_rank(DIM, queries), low_rank(DIM, keys), low_rank(DIM, keys)},
                     {low_rank(queries, DIM)},
                     {low_rank(DIM, INNER), form_.gated ? low_rank(DIM, INNER) : LowRank{}},
                     {low_rank(INNER, DIM)},
                     &slot_, ranks_, 3, RANKS, 0, 1};
    }

    LowRank low_rank(int inputs, int outputs) {
        const size_t count = size_t(LAYERS) * 3 * RANKS;
        auto* a = new std::vector<float>(numbers_.floats(count * inputs, 0.2f));
        auto* b = new std::vector<float>(numbers_.floats(count * outputs, 0.2f));
        return {a->data(), b->data(), inputs, outputs};
    }

    Norm norm(int width, bool biased) {
        auto* weight = new std::vector<float>(numbers_.floats(width));
        auto* bias = biased ? new std::vector<float>(numbers_.floats(width)) : nullptr;
        return {weight->data(), biased ? bias->data() : nullptr, 1e-5f};
    }

    Form form_;
    Numbers numbers_;
    std::vector<Layer> layers_;
    std::vector<float> cosines_, sines_, x_, keys_, values_;
    Adapters adapters_{};
    std::vector<int64_t> table_;
    int64_t slot_ = 2, ranks_[3] = {0, 3, 5};
    Decoder decoder_;
};

}  // namespace

int main() {
    std::fprintf(stderr, "%s\n", legato_instructions());
    for (int kind : {FLOAT32, BFLOAT16, INT8, INT4, INT8_SINGLE, INT4_SINGLE}) {
        products(kind, 590, 200);
        products(kind, 33, 7);
    }
    const Form forms[] = {
        {"llama", FLOAT32, 4, 2, 16, 16, true, false, false, false},
        {"qwen3", BFLOAT16, 4, 1, 24, 24, true, true, true, true},
        {"phi", FLOAT32, 3, 3, 80, 32, false, false, false, true},
        {"phi", INT4, 3, 3, 16, 8, false, false, true, true},
        {"llama", INT8, 6, 2, 16, 16, true, false, false, true},
    };
    for (const Form& form : forms) {
        Model model(form);
        std::string name = std::string(form.name) + " " + KINDS[form.kind];
        for (int chunk : {1, 5, 29, 87})
            print(name + ", chunks of " + std::to_string(chunk), model.run(pools()[chunk % 3], chunk, false));
        print(name + ", all at once", model.run(pools()[1], 90, true));
    }
}

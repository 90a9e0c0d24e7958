// An 8-bit RGB image to the vision tower's patches, and the tower's features to one grid.
//
// GRID patches on a side of a crop, PATCH pixels of a patch, MARGIN patches that neighbouring tiles share;
// kernels/cut_plan.py has a plan's layout.

constexpr int SIDE = GRID * PATCH;
constexpr int WINDOW = (GRID - 2 * MARGIN) * PATCH;
constexpr int TOKENS = GRID * GRID;
constexpr int PATCH_PIXELS = PATCH * PATCH;

struct Pass {
    const int* starts;
    const int* counts;
    const int* weights;
    int taps;
};

struct Target {
    int height, width;  // between the passes
    bool rows_first;
    Pass first, second;
};

__device__ Pass pass_of(const int* plan, const int* words) {
    const int* table = plan + words[0];
    const int size = words[1];
    return {table, table + size, table + 2 * size, words[2]};
}

__device__ Target target_of(const int* plan, int index) {
    const int* words = plan + HEADER_WORDS + index * TARGET_WORDS;
    return {words[0], words[1], words[2] != 0, pass_of(plan, words + 3), pass_of(plan, words + 6)};
}

struct Pixel {
    unsigned char channels[3];
};

// Pixels `step` bytes apart, rounded and clipped to 8 bits.
__device__ Pixel weighted(const unsigned char* bytes, int step, const int* weights, int count) {
    int sums[3] = {1 << (PRECISION_BITS - 1), 1 << (PRECISION_BITS - 1), 1 << (PRECISION_BITS - 1)};
    for (int tap = 0; tap < count; ++tap) {
        const int weight = weights[tap];
        for (int channel = 0; channel < 3; ++channel) sums[channel] += bytes[tap * step + channel] * weight;
    }
    Pixel out;
    for (int channel = 0; channel < 3; ++channel) {
        const int sum = sums[channel] >> PRECISION_BITS;
        out.channels[channel] = static_cast<unsigned char>(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    }
    return out;
}

// A pixel of `between` per thread; the canvas follows the whole image.
extern "C" __global__ void image_first_pass(
    const unsigned char* __restrict__ pixels, const int* __restrict__ plan,
    unsigned char* __restrict__ between) {
    const int width = plan[2];
    const Target whole = target_of(plan, 0), canvas = target_of(plan, 1);
    const int whole_size = whole.height * whole.width;
    const int size = whole_size + canvas.height * canvas.width;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        const Target& target = i < whole_size ? whole : canvas;
        const int pixel = i < whole_size ? i : i - whole_size;
        const int y = pixel / target.width, x = pixel % target.width;
        const Pass& pass = target.first;
        const int at = target.rows_first ? y : x;
        const int start = pass.starts[at], count = pass.counts[at];
        const int source = target.rows_first ? start * width + x : y * width + start;
        const int step = target.rows_first ? 3 * width : 3;
        const Pixel made = weighted(pixels + 3 * source, step, pass.weights + at * pass.taps, count);
        for (int channel = 0; channel < 3; ++channel) between[3 * i + channel] = made.channels[channel];
    }
}

// A pixel of `patches` [num_crops, TOKENS, step] per thread, by `levels`. Crops that the image lacks are zeros.
extern "C" __global__ void image_patches(
    const unsigned char* __restrict__ between, const int* __restrict__ plan,
    const unsigned short* __restrict__ levels, unsigned short* __restrict__ patches, int step, int num_crops) {
    const int columns = plan[1], crops = plan[3];
    const Target whole = target_of(plan, 0), canvas = target_of(plan, 1);
    const unsigned char* canvas_between = between + 3 * whole.height * whole.width;
    const int size = num_crops * TOKENS * PATCH_PIXELS;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        const int pixel = i % PATCH_PIXELS, token = i / PATCH_PIXELS % TOKENS;
        const int crop = i / (PATCH_PIXELS * TOKENS);
        unsigned short* const out = patches + i / PATCH_PIXELS * step + pixel;
        if (crop >= crops) {
            for (int channel = 0; channel < 3; ++channel) out[channel * PATCH_PIXELS] = 0;
            continue;
        }
        int y = token / GRID * PATCH + pixel / PATCH;
        int x = token % GRID * PATCH + pixel % PATCH;
        if (crop > 0) {
            y += (crop - 1) / columns * WINDOW;
            x += (crop - 1) % columns * WINDOW;
        }
        const Target& target = crop > 0 ? canvas : whole;
        const unsigned char* bytes = crop > 0 ? canvas_between : between;
        const Pass& pass = target.second;
        const int at = target.rows_first ? x : y;
        const int start = pass.starts[at], count = pass.counts[at];
        const int source = target.rows_first ? y * target.width + start : start * target.width + x;
        const int stride = target.rows_first ? 3 : 3 * target.width;
        const Pixel made = weighted(bytes + 3 * source, stride, pass.weights + at * pass.taps, count);
        for (int channel = 0; channel < 3; ++channel)
            out[channel * PATCH_PIXELS] = levels[made.channels[channel]];
    }
}

__device__ float low_half(unsigned int pair) { return __uint_as_float(pair << 16); }

__device__ float high_half(unsigned int pair) { return __uint_as_float(pair & 0xffff0000u); }

// To bfloat16, ties to even.
__device__ unsigned int rounded(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// Outer tiles keep their margin.
__device__ int tile_of(int at, int tiles) {
    const int tile = at < MARGIN ? 0 : (at - MARGIN) / (GRID - 2 * MARGIN);
    return tile < tiles ? tile : tiles - 1;
}

// Features [N, TOKENS, D] to `joined` [TOKENS, 2 * D], bfloat16 in pairs: the whole image's, then the tiles',
// stitched and averaged over windows. One block per token; `tiling` is rows and columns.
extern "C" __global__ void stitch_pool(
    const unsigned int* __restrict__ features, const int* __restrict__ tiling,
    unsigned int* __restrict__ joined, int pairs) {
    const int rows = tiling[0], columns = tiling[1], token = blockIdx.x;
    const bool tiled = rows * columns > 1;
    const int height = rows * (GRID - 2 * MARGIN) + 2 * MARGIN;
    const int width = columns * (GRID - 2 * MARGIN) + 2 * MARGIN;
    const int i = token / GRID, j = token % GRID;
    const int top = i * height / GRID, bottom = ((i + 1) * height + GRID - 1) / GRID;
    const int left = j * width / GRID, right = ((j + 1) * width + GRID - 1) / GRID;
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const unsigned int whole = features[token * pairs + pair];
        unsigned int local = whole;
        if (tiled) {
            float low = 0.0f, high = 0.0f;
            for (int y = top; y < bottom; ++y) {
                const int row = tile_of(y, rows), in_y = y - row * (GRID - 2 * MARGIN);
#pragma unroll 4
                for (int x = left; x < right; ++x) {
                    const int column = tile_of(x, columns), in_x = x - column * (GRID - 2 * MARGIN);
                    const int tile = (1 + row * columns + column) * TOKENS + in_y * GRID + in_x;
                    const unsigned int value = features[tile * pairs + pair];
                    low += low_half(value);
                    high += high_half(value);
                }
            }
            low = low / (bottom - top) / (right - left);
            high = high / (bottom - top) / (right - left);
            local = rounded(low) | rounded(high) << 16;
        }
        joined[token * 2 * pairs + pair] = whole;
        joined[token * 2 * pairs + pairs + pair] = local;
    }
}

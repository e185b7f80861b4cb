// The steps between products: norms, rotation, gates, and storing rows. W: numbers that a thread
// reads and writes at once, 8 if everything is aligned to 16 bytes, else 1.
#include "exl2.cuh"
#include "activations.cuh"
#include "early.cuh"

template <int W> struct __align__(2 * W) Halves { half_bits of[W]; };
template <int W> struct __align__(W < 4 ? 4 * W : 16) Floats { float of[W]; };

// Sum over the threads of a row: a warp, or the CTA, with room for 32 numbers.
__device__ __forceinline__ float sum_of_row(float value, int threads, float* room) {
    value = sum_of_warp(value);
    if (threads == 32) return value;
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0.0f;
    for (int w = 0; w < threads / 32; ++w) value += room[w];
    return value;
}

__device__ __forceinline__ half_bits normed(half_bits x, float size, half_bits weight) {
    return to_half(from_half(to_half(from_half(x) * size)) * from_half(weight));
}

// x fp16 → RN16(RN16(x · size) · weight): a row of `pieces` of 8 numbers has 32 threads or those of
// the CTA; each keeps its own pieces, so that x is read once.
extern "C" __global__ void rms_norm_8(const Halves<8>* x, const Halves<8>* weight, Halves<8>* y,
                                      integer rows, integer pieces, float eps, integer threads) {
    __shared__ float room[32];
    overlap_launches();
    const int together = blockDim.x / (int)threads, first = threadIdx.x % (int)threads;
    const integer row = (integer)blockIdx.x * together + threadIdx.x / (int)threads;
    if (row >= rows) return;
    x += row * pieces;
    y += row * pieces;
    Halves<8> kept[NORM_PIECES];
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < NORM_PIECES; ++j) {
        const int i = first + j * (int)threads;
        if (i < pieces) kept[j] = x[i];
    }
#pragma unroll
    for (int j = 0; j < NORM_PIECES; ++j) {
        if (first + j * (int)threads >= pieces) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = from_half(kept[j].of[i]);
            square += value * value;
        }
    }
    const float size = rsqrtf(sum_of_row(square, threads, room) / (8 * pieces) + eps);
#pragma unroll
    for (int j = 0; j < NORM_PIECES; ++j) {
        const int i = first + j * (int)threads;
        if (i >= pieces) continue;
        const Halves<8> w = weight[i];
#pragma unroll
        for (int n = 0; n < 8; ++n) kept[j].of[n] = normed(kept[j].of[n], size, w.of[n]);
        y[i] = kept[j];
    }
}

// x fp16 (rows, d) → hidden + RN16(RN16(RN16((x - mean) · size) · weight) + bias) · multiplier: one
// CTA per row. mean: 0 unless `centered`; bias, hidden: or null; weight and bias (heads, d), a row's
// head is that of its place.
extern "C" __global__ void add_normed(const half_bits* x, const half_bits* weight,
                                      const half_bits* bias, const half_bits* hidden, half_bits* y,
                                      integer d, integer heads, integer head_step,
                                      integer centered, float eps, float multiplier) {
    __shared__ float rooms[2][32];
    overlap_launches();
    const integer at = blockIdx.x * d, head = blockIdx.x / head_step % heads * d;
    float mean = 0.0f, square = 0.0f;
    if (centered) {
        for (int i = threadIdx.x; i < d; i += blockDim.x) mean += from_half(x[at + i]);
        mean = sum_of_row(mean, blockDim.x, rooms[0]) / d;
    }
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        const float value = from_half(x[at + i]) - mean;
        square += value * value;
    }
    const float size = rsqrtf(sum_of_row(square, blockDim.x, rooms[1]) / d + eps);
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        const half_bits whole = to_half((from_half(x[at + i]) - mean) * size);
        half_bits value = to_half(from_half(whole) * from_half(weight[head + i]));
        if (bias) value = to_half(from_half(value) + from_half(bias[head + i]));
        if (hidden) value = to_half(from_half(hidden[at + i]) + from_half(value) * multiplier);
        else value = to_half(from_half(value) * multiplier);
        y[at + i] = value;
    }
}

struct Heads {  // x and y (b, heads, t, head_dim); strides of b, h and t, first those of x
    integer heads, head_dim, half, row_step, head_step, place_step;
    integer y_row_step, y_head_step, y_place_step;
    integer table_row_step, table_place_step;  // of cosines and sines fp32 (b or 1, t, half)
};

// Heads x fp16, with any strides but the last, → y; the first 2 · half dimensions are rotated. A CTA has
// heads of one place, a thread W pairs, or W numbers that are copied: blockIdx is (place, piece of
// the heads, row).
template <int W>
__device__ __forceinline__ void rotate(const half_bits* x, const float* cosines, const float* sines,
                                       half_bits* y, const Heads& h) {
    overlap_launches();
    const int pairs = (int)h.half / W, units = ((int)h.head_dim - (int)h.half) / W;
    const int unit = blockIdx.y * blockDim.x + threadIdx.x, head = unit / units, i = unit % units;
    if (head >= h.heads) return;
    x += blockIdx.z * h.row_step + head * h.head_step + blockIdx.x * h.place_step;
    y += blockIdx.z * h.y_row_step + head * h.y_head_step + blockIdx.x * h.y_place_step;
    if (i >= pairs) {
        const integer from = h.half + (integer)i * W;
        *(Halves<W>*)(y + from) = *(const Halves<W>*)(x + from);
        return;
    }
    const integer low = i * W, high = low + h.half;
    const integer angle = blockIdx.z * h.table_row_step + blockIdx.x * h.table_place_step + i * W;
    Halves<W> first = *(const Halves<W>*)(x + low), second = *(const Halves<W>*)(x + high);
    constexpr int F = W < 4 ? W : 4;
#pragma unroll
    for (int part = 0; part < W; part += F) {
        const Floats<F> c = *(const Floats<F>*)(cosines + angle + part);
        const Floats<F> s = *(const Floats<F>*)(sines + angle + part);
#pragma unroll
        for (int n = 0; n < F; ++n) {
            const float a = from_half(first.of[part + n]), b = from_half(second.of[part + n]);
            first.of[part + n] = to_half(__fsub_rn(__fmul_rn(a, c.of[n]), __fmul_rn(b, s.of[n])));
            second.of[part + n] = to_half(__fadd_rn(__fmul_rn(b, c.of[n]), __fmul_rn(a, s.of[n])));
        }
    }
    *(Halves<W>*)(y + low) = first;
    *(Halves<W>*)(y + high) = second;
}

#define ROTATE(W)                                                                                 \
    extern "C" __global__ void rotate_##W(const half_bits* x, const float* cosines,               \
                                          const float* sines, half_bits* y, integer heads,        \
                                          integer head_dim, integer half, integer row_step,       \
                                          integer head_step, integer place_step,                  \
                                          integer y_row_step, integer y_head_step,                \
                                          integer y_place_step, integer table_row_step,           \
                                          integer table_place_step) {                             \
        rotate<W>(x, cosines, sines, y,                                                           \
                  {heads, head_dim, half, row_step, head_step, place_step, y_row_step,            \
                   y_head_step, y_place_step, table_row_step, table_place_step});                 \
    }
ROTATE(1)
ROTATE(8)

// gate and up fp16 → RN16(RN16(activation(gate)) · up), rows of `count` pieces of W numbers, a
// `step` apart in gate and up: blockIdx.y is a row.
template <int W, int ACTIVATION>
__device__ __forceinline__ void gated(const Halves<W>* gate, const Halves<W>* up, Halves<W>* y,
                                      integer count, integer step) {
    overlap_launches();
    const integer i = grid_thread();
    if (i >= count) return;
    gate += blockIdx.y * step, up += blockIdx.y * step, y += blockIdx.y * count;
    Halves<W> value = gate[i];
    const Halves<W> other = up[i];
#pragma unroll
    for (int n = 0; n < W; ++n) {
        const float open = from_half(to_half(activated(ACTIVATION, from_half(value.of[n]))));
        value.of[n] = to_half(open * from_half(other.of[n]));
    }
    y[i] = value;
}

// gate and up fp16 → RN16(clamped_swiglu(gate, up)), laid out as in `gated`.
template <int W>
__device__ __forceinline__ void gated_clamped_swiglu(const Halves<W>* gate, const Halves<W>* up,
                                                     Halves<W>* y, integer count, integer step) {
    overlap_launches();
    const integer i = grid_thread();
    if (i >= count) return;
    gate += blockIdx.y * step, up += blockIdx.y * step, y += blockIdx.y * count;
    Halves<W> value = gate[i];
    const Halves<W> other = up[i];
#pragma unroll
    for (int n = 0; n < W; ++n)
        value.of[n] = to_half(clamped_swiglu(from_half(value.of[n]), from_half(other.of[n])));
    y[i] = value;
}

#define GATED_CLAMPED_SWIGLU(W)                                                                   \
    extern "C" __global__ void gated_clamped_swiglu_##W(const Halves<W>* gate,                    \
                                                        const Halves<W>* up, Halves<W>* y,        \
                                                        integer count, integer step) {            \
        gated_clamped_swiglu<W>(gate, up, y, count, step);                                        \
    }
GATED_CLAMPED_SWIGLU(1)
GATED_CLAMPED_SWIGLU(8)

// x fp16 → RN16(activation(x)), `count` pieces of W numbers.
template <int W, int ACTIVATION>
__device__ __forceinline__ void activated(const Halves<W>* x, Halves<W>* y, integer count) {
    overlap_launches();
    const integer i = grid_thread();
    if (i >= count) return;
    Halves<W> value = x[i];
#pragma unroll
    for (int n = 0; n < W; ++n)
        value.of[n] = to_half(activated(ACTIVATION, from_half(value.of[n])));
    y[i] = value;
}

#define GATED_BY(NAME, ACTIVATION, W)                                                             \
    extern "C" __global__ void gated_##NAME##_##W(const Halves<W>* gate, const Halves<W>* up,     \
                                                  Halves<W>* y, integer count, integer step) {    \
        gated<W, ACTIVATION>(gate, up, y, count, step);                                           \
    }                                                                                             \
    extern "C" __global__ void activated_##NAME##_##W(const Halves<W>* x, Halves<W>* y,           \
                                                      integer count) {                            \
        activated<W, ACTIVATION>(x, y, count);                                                    \
    }

#define GATED(NAME, ACTIVATION)                                                                   \
    GATED_BY(NAME, ACTIVATION, 1)                                                                 \
    GATED_BY(NAME, ACTIVATION, 8)
GATED(silu, SILU)
GATED(gelu, GELU)
GATED(gelu_tanh, GELU_TANH)
GATED(relu, RELU)
GATED(relu2, RELU2)

// x (t, pieces), rows a `step` apart → rows `slots` int64 (t,) of `data`, in pieces of 16 bytes:
// blockIdx.x is a row.
extern "C" __global__ void put_rows(const uint4* x, const integer* slots, uint4* data,
                                    integer pieces, integer step) {
    overlap_launches();
    const integer i = (integer)blockIdx.y * blockDim.x + threadIdx.x;
    if (i < pieces) data[slots[blockIdx.x] * pieces + i] = x[blockIdx.x * step + i];
}

// The inverse: rows `slots` of `data` → x (t, pieces).
extern "C" __global__ void get_rows(uint4* x, const integer* slots, const uint4* data,
                                    integer pieces) {
    overlap_launches();
    const integer i = (integer)blockIdx.y * blockDim.x + threadIdx.x;
    if (i < pieces) x[blockIdx.x * pieces + i] = data[slots[blockIdx.x] * pieces + i];
}

// fp16 results of attention to two sets of positions, a and b (t, heads, pieces), with the natural
// logarithms of the sums of their weights, fp32 (heads, t) → result and sums for both sets.
extern "C" __global__ void joined(const Halves<8>* a, const Halves<8>* b, const float* a_sums,
                                  const float* b_sums, Halves<8>* y, float* sums, integer tokens,
                                  integer heads, integer pieces) {
    overlap_launches();
    const integer i = grid_thread(), row = i / pieces;
    if (row >= tokens * heads) return;
    const integer at = row % heads * tokens + row / heads;
    const float share = 1.0f / (1.0f + __expf(a_sums[at] - b_sums[at]));
    if (i % pieces == 0)
        sums[at] = fmaxf(a_sums[at], b_sums[at]) + log1pf(__expf(-fabsf(a_sums[at] - b_sums[at])));
    const Halves<8> first = a[i], second = b[i];
    Halves<8> value;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float x = from_half(first.of[n]);
        value.of[n] = to_half(x + share * (from_half(second.of[n]) - x));
    }
    y[i] = value;
}

// The rows of token ids (rows of `count`, `step` apart) in a table, times a multiplier; an id without a
// row has the first one.
extern "C" __global__ void embed(const integer* ids, const Halves<8>* table, Halves<8>* y,
                                 integer count, integer step, integer known, integer pieces,
                                 float multiplier) {
    overlap_launches();
    const integer i = (integer)blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
    if (i >= pieces) return;
    const integer id = ids[row / count * step + row % count];
    Halves<8> value = table[(id >= 0 && id < known ? id : 0) * pieces + i];
    if (multiplier != 1.0f)
#pragma unroll
        for (int n = 0; n < 8; ++n) value.of[n] = to_half(from_half(value.of[n]) * multiplier);
    y[row * pieces + i] = value;
}

// The positions of `count` new tokens of each text, and their slots in its pages.
extern "C" __global__ void next_slots(const int* tables, const int* lengths, integer* positions,
                                      integer* slots, integer all, integer count, integer pages) {
    overlap_launches();
    const integer i = grid_thread();
    if (i >= all) return;
    const integer text = i / count, position = lengths[text] + i % count;
    positions[i] = position;
    slots[i] = (integer)tables[text * pages + position / PAGE_TOKENS] * PAGE_TOKENS +
               position % PAGE_TOKENS;
}

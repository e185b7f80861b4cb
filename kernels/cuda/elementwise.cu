// What lies between the products of a decoding step: norms and rotation.
#include "exl2.cuh"
#include "early.cuh"

// x fp16 (rows, d) → RN16(RN16(x · size) · weight): a CTA has a row.
extern "C" __global__ void rms_norm(const half_bits* x, const half_bits* weight, half_bits* y,
                                    integer d, float eps) {
    __shared__ float sums[32];
    let_the_next_begin();
    wait_for_input();
    x += blockIdx.x * d;
    y += blockIdx.x * d;
    float square = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        const float value = from_half(x[i]);
        square += value * value;
    }
    for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
    __syncthreads();
    square = 0.0f;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) square += sums[w];
    const float size = rsqrtf(square / d + eps);
    for (int i = threadIdx.x; i < d; i += blockDim.x)
        y[i] = to_half(from_half(to_half(from_half(x[i]) * size)) * from_half(weight[i]));
}

// Heads x fp16 (b, h, t, head_dim), of any strides but the last, → y with the same ones. The first
// 2 · half dimensions are rotated by cosines and sines fp32 (b or 1, t, half). Steps are from one to
// the next of b, h and t in x, and of b and t in the table.
extern "C" __global__ void rotate(const half_bits* x, const float* cosines, const float* sines,
                                  half_bits* y, integer heads, integer t, integer head_dim,
                                  integer half, integer row_step, integer head_step,
                                  integer place_step, integer table_row_step,
                                  integer table_place_step) {
    let_the_next_begin();
    wait_for_input();
    const integer place = blockIdx.x % t, head = blockIdx.x / t % heads;
    const integer row = blockIdx.x / t / heads;
    const integer at = row * row_step + head * head_step + place * place_step;
    const integer angle = row * table_row_step + place * table_place_step;
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
        if (i >= 2 * half) {
            y[at + i] = x[at + i];
        } else if (i < half) {
            const float first = from_half(x[at + i]), second = from_half(x[at + half + i]);
            const float c = cosines[angle + i], s = sines[angle + i];
            y[at + i] = to_half(__fsub_rn(__fmul_rn(first, c), __fmul_rn(second, s)));
            y[at + half + i] = to_half(__fadd_rn(__fmul_rn(second, c), __fmul_rn(first, s)));
        }
    }
}

// x fp16 (rows, d) → y[i] = x[order[i]]: blockIdx.x is a row, blockIdx.y a piece of it.
extern "C" __global__ void reorder(const half_bits* x, const integer* order, half_bits* y,
                                   integer d) {
    const integer i = blockIdx.y * blockDim.x + threadIdx.x, from = i < d ? order[i] : 0;
    let_the_next_begin();
    wait_for_input();
    if (i < d) y[blockIdx.x * d + i] = x[blockIdx.x * d + from];
}

// The same for many rows: a CTA has `together` of them, each of which lies in its shared memory while
// it is put in order; a thread has the same places of all, eight side by side. d: a multiple of 8.
extern "C" __global__ void reorder_rows(const half_bits* x, const integer* order, half_bits* y,
                                        integer rows, integer d, integer together) {
    extern __shared__ __align__(16) half_bits row[];
    let_the_next_begin();
    wait_for_input();
    const integer first = blockIdx.x * together;
    for (integer r = first; r < min(rows, first + together); ++r) {
        for (integer c = threadIdx.x; c < d / 8; c += blockDim.x)
            ((uint4*)row)[c] = ((const uint4*)(x + r * d))[c];
        __syncthreads();
        for (integer c = threadIdx.x; c < d / 8; c += blockDim.x) {
            unsigned pairs[4];
            for (int i = 0; i < 4; ++i)
                pairs[i] = row[order[8 * c + 2 * i]] | (unsigned)row[order[8 * c + 2 * i + 1]] << 16;
            ((uint4*)(y + r * d))[c] = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
        __syncthreads();
    }
}

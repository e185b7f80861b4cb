// Search of scales: one thread per column of a group.
#include "exl2.cuh"

#define REACHED (2 * CODE_REACH + 1)

// The scale at which the codes just span a column. x fp32 (j, r, n), of which rows (j,) are looked
// at -> base fp32 (j, n).
extern "C" __global__ void column_ranges(const float* x, const float* half_range,
                                         const integer* rows, float* base, integer r, integer n) {
    const integer column = (integer)blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y;
    if (column >= n) return;
    const float* from = x + j * r * n + column;
    float largest = 0.0f;
    for (integer row = 0; row < rows[j]; ++row) largest = fmaxf(largest, fabsf(from[row * n]));
    base[j * n + column] = (largest + EPSILON) / (half_range[j] - 0.5f);
}

// Every column's best scale code under each of `m` maxima, and its weighted squared error.
// x fp32 (j, r, n), base fp32 (j, n), maxima fp16 (j, m) -> codes, cost (j, m, n).
extern "C" __global__ void choose_codes(const float* x, const float* base, const half_bits* maxima,
                                        const float* half_range, const integer* rows,
                                        const float* row_weights, byte* codes, float* cost,
                                        integer r, integer n) {
    const integer column = (integer)blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.z;
    if (column >= n) return;
    const half_bits maximum = maxima[j * gridDim.y + blockIdx.y];
    const float share = EXPECTED_SHARE * base[j * n + column] / from_half(maximum);
    const float expected = rintf(SCALE_LEVELS * sqrtf(share)), high = half_range[j];
    float level[REACHED], scale[REACHED], inverse[REACHED], sum[REACHED];
#pragma unroll
    for (int i = 0; i < REACHED; ++i) {
        level[i] = clamped(expected + (i - CODE_REACH), 1.0f, SCALE_LEVELS);
        scale[i] = decoder_scale(level[i], maximum);
        inverse[i] = scale[i] > 0.0f ? 1.0f / scale[i] : 0.0f;
        sum[i] = 0.0f;
    }
    const float* from = x + j * r * n + column;
    const integer end = rows[j];
    for (integer row = 0; row < end; ++row) {
        const float value = from[row * n], weight = row_weights[row];
#pragma unroll
        for (int i = 0; i < REACHED; ++i) {
            const float step = clamped(rintf(value * inverse[i]), -high, high - 1.0f);
            const float error = step * scale[i] - value;
            sum[i] += weight * (error * error);
        }
    }
    int best = 0;
#pragma unroll
    for (int i = 1; i < REACHED; ++i)
        if (sum[i] < sum[best]) best = i;
    float chosen = level[0], least = sum[0];
#pragma unroll
    for (int i = 1; i < REACHED; ++i)
        if (i == best) chosen = level[i], least = sum[i];
    const integer place = (j * gridDim.y + blockIdx.y) * n + column;
    codes[place] = (byte)(chosen - 1.0f);
    cost[place] = least;
}

// Σ |x - Q(x)| ** 3.5 of GRID_TOGETHER multipliers of a column's step, over the columns of a CTA.
// x (j, r, n), steps and weights (j, n), grid (GRID_POINTS,) -> partial (j, GRID_POINTS, tiles);
// CTAs of 128 threads: (tiles, GRID_POINTS / GRID_TOGETHER, j).
extern "C" __global__ void __launch_bounds__(128)
grid_cost(const float* x, const float* steps, const float* weights, const float* half_range,
          const integer* rows, const float* grid, float* partial, integer r, integer n) {
    __shared__ float sums[4][GRID_TOGETHER];
    const integer column = (integer)blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.z;
    const int first = blockIdx.y * GRID_TOGETHER;
    const bool inside = column < n;
    const float high = half_range[j], step = inside ? steps[j * n + column] : 1.0f;
    const float* from = x + j * r * n + column;
    float p[GRID_TOGETHER], sum[GRID_TOGETHER];
#pragma unroll
    for (int i = 0; i < GRID_TOGETHER; ++i) {
        p[i] = grid[first + i < GRID_POINTS ? first + i : 0];
        sum[i] = 0.0f;
    }
    for (integer row = 0; inside && row < rows[j]; ++row) {
        const float y = from[row * n] / step;
#pragma unroll
        for (int i = 0; i < GRID_TOGETHER; ++i) {
            const float error =
                fabsf(clamped(rintf(y * (1.0f / p[i])), -high, high - 1.0f) * p[i] - y);
            sum[i] += sqrtf(error) * error * error * error;
        }
    }
    const float weight = inside ? weights[j * n + column] : 0.0f;
#pragma unroll
    for (int i = 0; i < GRID_TOGETHER; ++i) {
        float total = sum[i] * weight;
        for (int offset = 16; offset; offset >>= 1)
            total += __shfl_xor_sync(~0u, total, offset);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][i] = total;
    }
    __syncthreads();
    const int i = threadIdx.x;
    if (i < GRID_TOGETHER && first + i < GRID_POINTS)
        partial[(j * GRID_POINTS + first + i) * gridDim.x + blockIdx.x] =
            sums[0][i] + sums[1][i] + sums[2][i] + sums[3][i];
}

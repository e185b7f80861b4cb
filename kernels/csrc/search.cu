// Search for scales: one thread per column of a group.
#include "exl2.cuh"

#define REACHED (2 * CODE_REACH + 1)

// Rows fp32 (r, m) of matrices of n columns side by side. A searched one, `blockIdx.z` or `.y`, is
// matrix places[...]; its group has rows[...] rows. Row weights lie `apart` for every `own` matrices.

// The scale at which the codes just span a column -> base fp32 (searched, n).
extern "C" __global__ void column_ranges(const float* x, const integer* places, const integer* rows,
                                         const float* half_range, float* base, integer m,
                                         integer n) {
    const integer column = grid_thread(), j = blockIdx.y;
    if (column >= n) return;
    const float* from = x + places[j] * n + column;
    const integer end = rows[j];
    float largest = 0.0f;
    for (integer row = 0; row < end; ++row) largest = fmaxf(largest, fabsf(from[row * m]));
    base[j * n + column] = (largest + EPSILON) / (half_range[j] - 0.5f);
}

// The level, 1 to SCALE_LEVELS, of a column's best scale under a maximum, and its weighted squared
// error; levels around the expected one are tried.
__device__ float best_level(const float* column, const float* row_weights, integer rows, integer m,
                            float base, float half_range, half_bits maximum, float* error) {
    const float share = EXPECTED_SHARE * base / from_half(maximum);
    const float expected = rintf(SCALE_LEVELS * sqrtf(share));
    float level[REACHED], scale[REACHED], inverse[REACHED], sum[REACHED];
#pragma unroll
    for (int i = 0; i < REACHED; ++i) {
        level[i] = clamped(expected + (i - CODE_REACH), 1.0f, SCALE_LEVELS);
        scale[i] = decoder_scale(level[i], maximum);
        inverse[i] = scale[i] > 0.0f ? 1.0f / scale[i] : 0.0f;
        sum[i] = 0.0f;
    }
    for (integer row = 0; row < rows; ++row) {
        const float value = column[row * m], weight = row_weights[row];
#pragma unroll
        for (int i = 0; i < REACHED; ++i) {
            const float step =
                clamped(rintf(value * inverse[i]), -half_range, half_range - 1.0f);
            const float miss = step * scale[i] - value;
            sum[i] += weight * (miss * miss);
        }
    }
    float best = level[0];
    *error = sum[0];
#pragma unroll
    for (int i = 1; i < REACHED; ++i)
        if (sum[i] < *error) best = level[i], *error = sum[i];
    return best;
}

// The errors of sampled columns under the multiples of the largest range: the first WIDEST_COLUMNS
// in order (searched, n), by falling range, and every `step`-th of the rest -> cost
// (searched, MAXIMA, sampled).
extern "C" __global__ void maximum_costs(const float* x, const integer* places, const integer* rows,
                                         const float* half_range, const float* row_weights,
                                         integer apart, integer own, const float* base,
                                         const integer* order,
                                         const float* multiples, float* cost, integer m, integer n,
                                         integer step, integer sampled) {
    const integer i = grid_thread(), j = blockIdx.z;
    if (i >= sampled) return;
    order += j * n;
    base += j * n;
    const integer column =
        order[i < WIDEST_COLUMNS ? i : WIDEST_COLUMNS + (i - WIDEST_COLUMNS) * step];
    const half_bits maximum = to_half(base[order[0]] * multiples[blockIdx.y]);
    float error;
    best_level(x + places[j] * n + column, row_weights + places[j] / own * apart, rows[j], m,
               base[column], half_range[j], maximum, &error);
    cost[(j * MAXIMA + blockIdx.y) * sampled + i] = error;
}

// The multiple with the least cost -> chosen fp16 (searched,), and maxima of all matrices. CTAs of
// 32 * MAXIMA threads.
extern "C" __global__ void best_maximum(const integer* places, const float* base,
                                        const integer* order, const float* multiples,
                                        const float* cost, half_bits* chosen, half_bits* maxima,
                                        integer n, integer step, integer sampled) {
    __shared__ float sums[MAXIMA];
    const integer j = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (integer i = lane; i < sampled; i += 32)
        sum += cost[(j * MAXIMA + warp) * sampled + i] * (i < WIDEST_COLUMNS ? 1.0f : (float)step);
    sum = sum_of_warp(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    int best = 0;
    for (int i = 1; i < MAXIMA; ++i)
        if (sums[i] < sums[best]) best = i;
    maxima[places[j]] = chosen[j] = to_half(base[j * n + order[j * n]] * multiples[best]);
}

// Every column's best code under the chosen maximum -> codes, decoded scales and half ranges of all
// matrices, (m,).
extern "C" __global__ void choose_codes(const float* x, const integer* places, const integer* rows,
                                        const float* half_range, const float* row_weights,
                                        integer apart, integer own, const float* base,
                                        const half_bits* chosen, byte* codes,
                                        float* decoded, float* half_ranges, integer m, integer n) {
    const integer column = grid_thread(), j = blockIdx.y;
    if (column >= n) return;
    const integer place = places[j] * n + column;
    float error;
    const float level = best_level(x + place, row_weights + places[j] / own * apart, rows[j], m,
                                   base[j * n + column], half_range[j], chosen[j], &error);
    codes[place] = (byte)(level - 1.0f);
    decoded[place] = decoder_scale(level, chosen[j]);
    half_ranges[place] = half_range[j];
}

// Σ |x - Q(x)| ** 3.5 of GRID_TOGETHER multipliers of a column's step, over the columns of a CTA.
// x (j, r, n), steps and weights (j, n), grid (GRID_POINTS,) -> partial (j, GRID_POINTS, tiles);
// CTAs of 128 threads: (tiles, GRID_POINTS / GRID_TOGETHER, j).
extern "C" __global__ void __launch_bounds__(128)
grid_cost(const float* x, const float* steps, const float* weights, const float* half_range,
          const integer* rows, const float* grid, float* partial, integer r, integer n) {
    __shared__ float sums[4][GRID_TOGETHER];
    const integer column = grid_thread(), j = blockIdx.z;
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
        const float total = sum_of_warp(sum[i] * weight);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][i] = total;
    }
    __syncthreads();
    const int i = threadIdx.x;
    if (i < GRID_TOGETHER && first + i < GRID_POINTS)
        partial[(j * GRID_POINTS + first + i) * gridDim.x + blockIdx.x] =
            sums[0][i] + sums[1][i] + sums[2][i] + sums[3][i];
}

// Refit of scales with fixed codes: see reference/refit.py. Matrices lie side by side, m = j * n; a CTA
// handles columns of one matrix. `tries` of different strength are computed at the same time.
#include "exl2.cuh"

#define WARPS 4  // per CTA

// Sum in a fixed order; every thread of a warp gets it.
__device__ __forceinline__ float sum_of(const float* values, integer count) {
    float sum = 0.0f;
    for (integer i = threadIdx.x % 32; i < count; i += 32) sum += values[i];
    return sum_of_warp(sum);
}

// The level whose scale is nearest to `wanted`, and that scale.
__device__ __forceinline__ float nearest_level(float wanted, half_bits maximum, float* scale) {
    const float unit = from_half(to_half(from_half(maximum) / (SCALE_LEVELS * SCALE_LEVELS)));
    const float root = floorf(sqrtf(fmaxf(wanted, 0.0f) / fmaxf(unit, LEAST_UNIT)));
    const float low = clamped(root, 1.0f, SCALE_LEVELS), high = clamped(root + 1, 1.0f, SCALE_LEVELS);
    const float below = decoder_scale(low, maximum), above = decoder_scale(high, maximum);
    const bool upper = fabsf(above - wanted) < fabsf(below - wanted);
    *scale = upper ? above : below;
    return upper ? high : low;
}

// steps, bent = H steps, pushed = H E O, fp32 (r, m); O (blocks, b, b) or null; decoded (m,) ->
// curvature of every column's objective in its scale, and the wanted scale, fp32 (m,).
extern "C" __global__ void wanted_scales(const float* steps, const float* bent, const float* pushed,
                                         const float* O, const float* decoded, float* curvature,
                                         float* wanted, integer r, integer m, integer b) {
    const integer column = grid_thread();
    if (column >= m) return;
    float bend = 0.0f, slope = 0.0f;
    for (integer place = column; place < r * m; place += m) {
        bend += bent[place] * steps[place];
        slope += pushed[place] * steps[place];
    }
    if (O) bend *= O[(column / b * b + column % b) * b + column % b];
    curvature[column] = bend;
    wanted[column] = decoded[column] - (bend > 0.0f ? slope / fmaxf(bend, LEAST_CURVATURE) : 0.0f);
}

// The distance of the nearest scales under each of REFIT_MAXIMA maxima from the wanted ones:
// curvature times squared error, summed over a CTA's columns -> partial (tries * j, REFIT_MAXIMA,
// tiles).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
scale_misses(const float* wanted, const float* curvature, const float* decoded,
             const half_bits* maxima, const float* multiples, float* partial, integer n, integer j) {
    __shared__ float sums[WARPS][REFIT_MAXIMA];
    const integer column = grid_thread(), matrix = blockIdx.y % j;
    const integer place = matrix * n + column;
    const float strength = exp2f(-float(blockIdx.y / j));
    const bool inside = column < n;
    const float before = inside ? decoded[place] : 0.0f;
    const float target = inside ? before + strength * (wanted[place] - before) : 0.0f;
    const float weight = inside ? curvature[place] : 0.0f;
    const float present = from_half(maxima[matrix]);
    for (int i = 0; i < REFIT_MAXIMA; ++i) {
        float scale;
        nearest_level(target, to_half(present * multiples[i]), &scale);
        const float sum = sum_of_warp(weight * ((scale - target) * (scale - target)));
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][i] = sum;
    }
    __syncthreads();
    const int i = threadIdx.x;
    if (i < REFIT_MAXIMA)
        partial[(blockIdx.y * REFIT_MAXIMA + i) * gridDim.x + blockIdx.x] =
            sums[0][i] + sums[1][i] + sums[2][i] + sums[3][i];
}

// Take the maximum of least error -> codes (tries, m), its maxima (tries, j), scales (tries, m) and
// the resulting change of values, fp32 (tries, r, m).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
nearest_scales(const float* wanted, const float* decoded, const half_bits* maxima,
               const float* multiples, const float* partial, const float* steps, byte* codes,
               half_bits* found_maxima, float* found, float* change, integer r, integer n,
               integer j) {
    __shared__ float sums[REFIT_MAXIMA];
    const integer column = grid_thread(), matrix = blockIdx.y % j;
    for (int i = threadIdx.x / 32; i < REFIT_MAXIMA; i += WARPS) {
        const float sum =
            sum_of(partial + (blockIdx.y * REFIT_MAXIMA + i) * gridDim.x, gridDim.x);
        if (threadIdx.x % 32 == 0) sums[i] = sum;
    }
    __syncthreads();
    int best = 0;
    for (int i = 1; i < REFIT_MAXIMA; ++i)
        if (sums[i] < sums[best]) best = i;
    const half_bits maximum = to_half(from_half(maxima[matrix]) * multiples[best]);
    if (column == 0) found_maxima[blockIdx.y] = maximum;
    if (column >= n) return;
    const integer place = matrix * n + column, m = j * n, attempt = blockIdx.y / j;
    const float before = decoded[place];
    const float target = before + exp2f(-float(attempt)) * (wanted[place] - before);
    float scale;
    codes[attempt * m + place] = (byte)(nearest_level(target, maximum, &scale) - 1.0f);
    found[attempt * m + place] = scale;
    change += attempt * r * m;
    for (integer row = 0; row < r; ++row)
        change[row * m + place] = steps[row * m + place] * (scale - before);
}

// Increase of the objective: (moved + 2 pushed) change, moved = H change O, summed over a CTA's
// columns -> partial (tries * j, tiles).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
scale_rises(const float* moved, const float* pushed, const float* change, float* partial, integer r,
            integer n, integer j) {
    __shared__ float sums[WARPS];
    const integer column = grid_thread(), m = j * n;
    const integer place = blockIdx.y % j * n + column, first = blockIdx.y / j * r * m + place;
    float rise = 0.0f;
    for (integer row = 0; column < n && row < r; ++row)
        rise += (moved[first + row * m] + 2.0f * pushed[place + row * m]) * change[first + row * m];
    rise = sum_of_warp(rise);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = rise;
    __syncthreads();
    if (threadIdx.x == 0)
        partial[blockIdx.y * gridDim.x + blockIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
}

// Take the first try that lowers a matrix's objective. rows (j,): of its group, 0: none -> codes
// (j, n), maxima (j,), decoded (panels, j, n), each only where a try is taken; taken fp32 (r, m),
// the change of values.
extern "C" __global__ void take_scales(const float* rises, const byte* found_codes,
                                       const half_bits* found_maxima, const float* found,
                                       const float* change, const integer* rows, byte* codes,
                                       half_bits* maxima, float* decoded, float* taken, integer r,
                                       integer n, integer j, integer tries) {
    const integer column = grid_thread(), matrix = blockIdx.y;
    const integer m = j * n, place = matrix * n + column;
    integer attempt = rows[matrix] ? 0 : tries;
    while (attempt < tries &&
           !(sum_of(rises + (attempt * j + matrix) * gridDim.x, gridDim.x) < 0.0f))
        ++attempt;
    if (attempt < tries && column == 0) maxima[matrix] = found_maxima[attempt * j + matrix];
    if (column >= n) return;
    for (integer row = 0; row < r; ++row)
        taken[row * m + place] =
            attempt < tries ? change[(attempt * r + row) * m + place] : 0.0f;
    if (attempt == tries) return;
    codes[place] = found_codes[attempt * m + place];
    for (integer panel = 0; panel < rows[matrix] / PANEL_ROWS; ++panel)
        decoded[panel * m + place] = found[attempt * m + place];
}

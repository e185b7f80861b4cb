// Rounding of a panel of rows, each row's error fed to the rows below.
#include "exl2.cuh"
#include "coupled.cuh"

// Independent columns: a thread per column, its rows in registers.
// rows fp32 (p, m), p <= PANEL_ROWS; upper: its diagonal block, rows `stride` apart.
extern "C" __global__ void __launch_bounds__(128)
round_panel(const float* rows, const float* upper, integer stride, const float* scales,
            const float* half_range, byte* codes, float* errors, integer p, integer m) {
    __shared__ float factor[PANEL_ROWS][PANEL_ROWS];
    for (int i = threadIdx.x; i < p * p; i += blockDim.x)
        factor[i / p][i % p] = upper[(i / p) * stride + i % p];
    __syncthreads();
    const integer column = (integer)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= m) return;
    const float scale = scales[column], high = half_range[column];
    float x[PANEL_ROWS];
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r) x[r] = r < p ? rows[r * m + column] : 0.0f;
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r) {
        if (r >= p) break;
        const float step = nearest_step(x[r], scale, high);
        const float error = (x[r] - from_half(to_half(step * scale))) / factor[r][r];
        codes[r * m + column] = (byte)(step + high);
        errors[r * m + column] = error;
#pragma unroll
        for (int below = r + 1; below < PANEL_ROWS; ++below)
            if (below < p) x[below] -= factor[r][below] * error;
    }
}

// Columns coupled by O (blocks, b, b): a CTA per block, a thread per column.
extern "C" __global__ void __launch_bounds__(MOST_COLUMNS, 1)
round_coupled(const float* rows, const float* upper, integer stride, const float* scales,
              const float* half_range, const float* O, byte* codes, float* errors, integer p,
              integer m, integer size) {
    __shared__ Room room;
    __shared__ float factor[PANEL_ROWS][PANEL_ROWS];
    const int b = (int)size, c = threadIdx.x;
    const integer column = blockIdx.x * size + c;
    O += blockIdx.x * size * size;
    for (int i = c; i < p * p; i += blockDim.x)
        factor[i / p][i % p] = upper[(i / p) * stride + i % p];
    const Column own = column_of(scales, half_range, O, column, b);
    __syncthreads();
    for (int r = 0; r < p; ++r) {
        const integer place = r * m + column;
        float x = 0.0f;
        if (c < b) {
            x = rows[place];
            for (int above = 0; above < r; ++above)
                x -= factor[above][r] * errors[above * m + column];
        }
        float step = nearest_step(x, own.scale, own.half_range);
        float gradient = push_all(step * own.scale - x, O, b, room);
        for (int sweep = 0; sweep < START_SWEEPS; ++sweep)
            for (int index = 0; index < CLASSES; ++index)
                move_class(index, O, b, own, 1.0f, step, gradient, room);
        if (c < b) {
            codes[place] = (byte)(step + own.half_range);
            errors[place] = (x - from_half(to_half(step * own.scale))) / factor[r][r];
        }
    }
}

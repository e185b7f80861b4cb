// Coordinate descent of a panel's codes on tr(O Eᵀ H E), row by row.
#include "exl2.cuh"
#include "coupled.cuh"

// Columns lie side by side by Hessian: `own` of each of `gridDim.y` Hessians, m together.

// Independent columns: one thread per column, its gradients in registers.
// steps fp32 (p, m), overwritten; gradient fp32 (p, m), H E; hessian: the panel's diagonal blocks,
// rows `stride` and Hessians `apart` apart -> change fp32 (p, m).
extern "C" __global__ void __launch_bounds__(128)
descend_panel(float* steps, const float* gradient, const float* hessian, integer stride,
              integer apart, const float* scales, const float* half_range, float* change, integer p,
              integer own) {
    __shared__ float h[PANEL_ROWS][PANEL_ROWS];
    load_block(hessian + blockIdx.y * apart, stride, p, h);
    __syncthreads();
    if (grid_thread() >= own) return;
    const integer m = gridDim.y * own, column = blockIdx.y * own + grid_thread();
    const float scale = scales[column], high = half_range[column];
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    float slope[PANEL_ROWS];
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r) slope[r] = r < p ? gradient[r * m + column] : 0.0f;
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r) {
        if (r >= p) break;
        const float before = steps[r * m + column];
        const float step =
            clamped(rintf(before - slope[r] * inverse / h[r][r]), -high, high - 1.0f);
        const float moved = (step - before) * scale;
        steps[r * m + column] = step;
        change[r * m + column] = moved;
#pragma unroll
        for (int below = r + 1; below < PANEL_ROWS; ++below)
            if (below < p) slope[below] += h[below][r] * moved;
    }
}

// Columns coupled by O (blocks, b, b): one CTA per block, one thread per column. `gradient`, H E O,
// is overwritten with what each row's change added to it, over its curvature. A Hessian has
// `own_blocks`.
extern "C" __global__ void __launch_bounds__(MOST_COLUMNS, 1)
descend_coupled(float* steps, float* gradient, const float* hessian, integer stride, integer apart,
                const float* scales, const float* half_range, const float* O, float* change,
                integer p, integer m, integer size, integer own_blocks) {
    __shared__ Room room;
    __shared__ float h[PANEL_ROWS][PANEL_ROWS];
    const int b = (int)size, c = threadIdx.x;
    const integer column = blockIdx.x * size + c;
    load_block(hessian + blockIdx.x / own_blocks * apart, stride, p, h);
    const Block own = block_of(scales, half_range, O, b);
    int turn = 0;
    __syncthreads();
    for (int r = 0; r < p; ++r) {
        const integer place = r * m + column;
        float before = 0.0f, slope = 0.0f;
        if (c < b) {
            before = steps[place];
            slope = gradient[place];
            for (int above = 0; above < r; ++above)
                slope += h[r][above] * gradient[above * m + column];
        }
        float step = before, sloped = slope;
        for (int index = 0; index < CLASSES; ++index)
            move_class(index, own, h[r][r], step, sloped, room, turn);
        if (c < b) {
            steps[place] = step;
            change[place] = (step - before) * own.scale;
            gradient[place] = (sloped - slope) / h[r][r];
        }
    }
}

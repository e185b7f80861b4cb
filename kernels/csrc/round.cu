// Round a panel of rows in order; each row's error is fed to the rows below.
#include "exl2.cuh"
#include "coupled.cuh"

#define TILE 64  // columns whose errors are multiplied by O at a time

// Columns lie side by side by factor: `own` of each of `gridDim.y` factors, m together.

// Independent columns: one thread per column, its rows in registers.
// rows fp32 (p, m), p <= PANEL_ROWS; upper: diagonal blocks of the factors, rows `stride` and
// factors `apart` apart.
extern "C" __global__ void __launch_bounds__(128)
round_panel(const float* rows, const float* upper, integer stride, integer apart,
            const float* scales, const float* half_range, byte* codes, float* errors, integer p,
            integer own) {
    __shared__ float factor[PANEL_ROWS][PANEL_ROWS];
    load_block(upper + blockIdx.y * apart, stride, p, factor);
    __syncthreads();
    if (grid_thread() >= own) return;
    const integer m = gridDim.y * own, column = blockIdx.y * own + grid_thread();
    const float scale = scales[column], high = half_range[column];
    float x[PANEL_ROWS];
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r) x[r] = r < p ? rows[r * m + column] : 0.0f;
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r) {
        if (r >= p) break;
        const float step = nearest_step(x[r], scale, high);
        const float error = (x[r] - decoded(step, scale)) / factor[r][r];
        codes[r * m + column] = (byte)(step + high);
        errors[r * m + column] = error;
#pragma unroll
        for (int below = r + 1; below < PANEL_ROWS; ++below)
            if (below < p) x[below] -= factor[r][below] * error;
    }
}

// Columns coupled by O (blocks, b, b): one CTA per block, one thread per column. A factor has
// `own_blocks`.
//
// A row starts at its nearest codes, whose gradient is a dense product with O. All the panel's rows
// compute theirs at once, from the codes nearest to their values before the panel; what feedback
// changes later is added: errors of rows above, times O, remain from their own descent, and few
// nearest codes move. The rounding of values to fp16 is ignored there. scratch fp32 (p, m).
extern "C" __global__ void __launch_bounds__(MOST_COLUMNS, 1)
round_coupled(const float* rows, const float* upper, integer stride, integer apart,
              const float* scales, const float* half_range, const float* O, byte* codes,
              float* errors, float* scratch, integer p, integer m, integer size, integer own_blocks) {
    __shared__ Room room;
    __shared__ float factor[PANEL_ROWS][PANEL_ROWS], nearest_error[TILE][PANEL_ROWS];
    const int b = (int)size, c = threadIdx.x;
    const integer first = blockIdx.x * size, column = first + c;
    load_block(upper + blockIdx.x / own_blocks * apart, stride, p, factor);
    const Block own = block_of(scales, half_range, O, b);
    float gradients[PANEL_ROWS];
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r) gradients[r] = 0.0f;
    for (int begin = 0; begin < b; begin += TILE) {
        __syncthreads();
        for (int i = c; i < TILE * PANEL_ROWS; i += blockDim.x) {
            const int from = i % TILE, r = i / TILE;
            float error = 0.0f;
            if (r < p && begin + from < b) {
                const integer other = first + begin + from;
                const float x = rows[r * m + other], scale = scales[other];
                error = nearest_step(x, scale, half_range[other]) * scale - x;
            }
            nearest_error[from][r] = error;
        }
        __syncthreads();
        const int count = b - begin < TILE ? b - begin : TILE;
        for (int from = 0; c < b && from < count; ++from) {
            const float o = own.O[(integer)(begin + from) * b + c];
#pragma unroll
            for (int r = 0; r < PANEL_ROWS; ++r) gradients[r] += nearest_error[from][r] * o;
        }
    }
#pragma unroll
    for (int r = 0; r < PANEL_ROWS; ++r)
        if (r < p && c < b) scratch[r * m + column] = gradients[r];
    int turn = 0;
    for (int r = 0; r < p; ++r) {
        const integer place = r * m + column;
        float before = 0.0f, x = 0.0f, gradient = 0.0f;
        if (c < b) {
            before = x = rows[place];
            gradient = scratch[place];
            for (int above = 0; above < r; ++above) {
                x -= factor[above][r] * errors[above * m + column];
                gradient += factor[above][r] * scratch[above * m + column];
            }
        }
        float step = nearest_step(x, own.scale, own.half_range);
        turn ^= 1;
        const float change =
            (step - nearest_step(before, own.scale, own.half_range)) * own.scale;
        const int total = list_moved(change, room, turn);
        gradient += push(total, own, room, turn);
        for (int sweep = 0; sweep < START_SWEEPS; ++sweep)
            for (int index = 0; index < CLASSES; ++index)
                move_class(index, own, 1.0f, step, gradient, room, turn);
        if (c < b) {
            codes[place] = (byte)(step + own.half_range);
            errors[place] = (x - decoded(step, own.scale)) / factor[r][r];
            scratch[place] = -gradient / factor[r][r];
        }
    }
}

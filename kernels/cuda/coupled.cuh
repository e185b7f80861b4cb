// Coordinate descent in one row and one block of the output factor O: a thread per column.
// The columns of a class move together if that lowers the objective, and only moved ones are
// pushed through O.

#define WARPS (MOST_COLUMNS / 32)

struct Room {  // shared by a CTA
    float change[MOST_COLUMNS];
    int moved[MOST_COLUMNS];
    float partial[WARPS];
    int counts[WARPS];
};

struct Column {  // of one thread; columns outside of the block have a scale of zero
    float scale, half_range, diagonal, inverse;
};

__device__ __forceinline__ Column column_of(const float* scales, const float* half_range,
                                            const float* O, integer column, int b) {
    const int c = threadIdx.x;
    if (c >= b) return {0.0f, 1.0f, 1.0f, 0.0f};
    const float scale = scales[column], diagonal = O[(integer)c * b + c];
    return {scale, half_range[column], diagonal, scale > 0.0f ? 1.0f / scale / diagonal : 0.0f};
}

// Over the CTA, in a fixed order; every thread gets the result.
__device__ float sum_of_all(float value, Room& room) {
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    if (threadIdx.x % 32 == 0) room.partial[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) total += room.partial[warp];
    __syncthreads();
    return total;
}

__device__ float largest_of_all(float value, Room& room) {
    for (int offset = 16; offset; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    if (threadIdx.x % 32 == 0) room.partial[threadIdx.x / 32] = value;
    __syncthreads();
    float most = room.partial[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) most = fmaxf(most, room.partial[warp]);
    __syncthreads();
    return most;
}

// List the columns that change, in order; return how many.
__device__ int list_moved(float change, Room& room) {
    const unsigned lanes = __ballot_sync(~0u, change != 0.0f);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) room.counts[warp] = __popc(lanes);
    room.change[threadIdx.x] = change;
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) {
        if (w < warp) before += room.counts[w];
        total += room.counts[w];
    }
    if (change != 0.0f) room.moved[before + __popc(lanes & ((1u << lane) - 1))] = threadIdx.x;
    __syncthreads();
    return total;
}

// The thread's entry of `change` O over the listed columns.
__device__ float push(int total, const float* O, int b, const Room& room) {
    float pushed = 0.0f;
    if ((int)threadIdx.x < b) {
        const float* entry = O + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < total; ++i) {
            const int from = room.moved[i];
            pushed += room.change[from] * entry[(integer)from * b];
        }
    }
    return pushed;
}

// The thread's entry of `values` O, all columns.
__device__ float push_all(float value, const float* O, int b, Room& room) {
    room.change[threadIdx.x] = value;
    __syncthreads();
    float pushed = 0.0f;
    if ((int)threadIdx.x < b) {
        const float* entry = O + threadIdx.x;
#pragma unroll 16
        for (int i = 0; i < b; ++i) pushed += room.change[i] * entry[(integer)i * b];
    }
    __syncthreads();
    return pushed;
}

// Move the class `index`; `gradient` has been multiplied by O. All threads take part.
__device__ void move_class(int index, const float* O, int b, const Column& own, float curvature,
                           float& step, float& gradient, Room& room) {
    const bool member = (int)threadIdx.x < b && threadIdx.x % CLASSES == index;
    float best = step;
    if (member)
        best = clamped(rintf(step - gradient * own.inverse / curvature), -own.half_range,
                       own.half_range - 1.0f);
    float change = (best - step) * own.scale;
    for (int attempt = 0; attempt <= RETRIES; ++attempt) {
        const int total = list_moved(change, room);
        if (total == 0) return;
        const float pushed = push(total, O, b, room);
        const float rise = sum_of_all((gradient + 0.5f * curvature * pushed) * change, room);
        if (rise <= 0.0f) {
            gradient += curvature * pushed;
            if (change != 0.0f) step = best;
            return;
        }
        const float gain = -change * (curvature * change * own.diagonal + 2.0f * gradient);
        const float most = largest_of_all(gain, room);
        if (gain < most * (attempt + 1) / RETRIES) change = 0.0f;
    }
}

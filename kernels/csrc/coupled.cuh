// Coordinate descent in one row and one block of the output factor O: one thread per column.
// The columns of a class move together if that lowers the objective; only moved ones are multiplied
// by O.

#define WARPS (MOST_COLUMNS / 32)
struct Moved {
    float change;
    int column;
};

// Shared by a CTA. Two of each, used in turn: one is written while stragglers read the other.
struct Room {
    Moved moved[2][MOST_COLUMNS];
    int counts[2][WARPS];
    float partial[2][WARPS];
};

// Load a panel's block (p, p) of a matrix, rows `stride` apart.
__device__ __forceinline__ void load_block(const float* from, integer stride, integer p,
                                           float (*block)[PANEL_ROWS]) {
    for (int i = threadIdx.x; i < p * p; i += blockDim.x)
        block[i / p][i % p] = from[i / p * stride + i % p];
}

struct Block {  // of O, with the values of the thread's own column
    const float* O;
    int b;
    float scale, half_range, diagonal, inverse;  // columns outside the block: scale 0
};

__device__ __forceinline__ Block block_of(const float* scales, const float* half_range,
                                          const float* O, int b) {
    const int c = threadIdx.x;
    const integer column = (integer)blockIdx.x * b + c;
    O += (integer)blockIdx.x * b * b;
    if (c >= b) return {O, b, 0.0f, 1.0f, 1.0f, 0.0f};
    const float scale = scales[column], diagonal = O[(integer)c * b + c];
    const float inverse = scale > 0.0f ? 1.0f / scale / diagonal : 0.0f;
    return {O, b, scale, half_range[column], diagonal, inverse};
}

// Sum over the CTA, in a fixed order; every thread gets it.
__device__ float sum_of_all(float value, Room& room, int turn) {
    value = sum_of_warp(value);
    if (threadIdx.x % 32 == 0) room.partial[turn][threadIdx.x / 32] = value;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return sum_of_warp(lane < (int)blockDim.x / 32 ? room.partial[turn][lane] : 0.0f);
}

__device__ float largest_of_all(float value, Room& room, int turn) {
    for (int offset = 16; offset; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    __syncthreads();  // the previous sums have been read
    if (threadIdx.x % 32 == 0) room.partial[turn][threadIdx.x / 32] = value;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    float most = room.partial[turn][lane < (int)blockDim.x / 32 ? lane : 0];
    for (int offset = 16; offset; offset >>= 1)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    return most;
}

// List the columns that change, in order; return their number.
__device__ int list_moved(float change, Room& room, int turn) {
    const unsigned lanes = __ballot_sync(~0u, change != 0.0f);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) room.counts[turn][warp] = __popc(lanes);
    __syncthreads();
    const int own = lane < (int)blockDim.x / 32 ? room.counts[turn][lane] : 0;
    const int total = __reduce_add_sync(~0u, own);
    if (total == 0) return 0;
    const int before = __reduce_add_sync(~0u, lane < warp ? own : 0);
    const int place = before + __popc(lanes & ((1u << lane) - 1));
    if (change != 0.0f) room.moved[turn][place] = {change, (int)threadIdx.x};
    __syncthreads();
    return total;
}

// Add changes, at most COUNT, times the thread's entries of O in a fixed order. All entries are read
// before the first is used, because L2 is far away.
template <int COUNT>
__device__ __forceinline__ float push_few(float pushed, const Moved* moved, int total,
                                          const float* entry, int b) {
    float change[COUNT], o[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        change[i] = o[i] = 0.0f;
        if (i < total) {
            change[i] = moved[i].change;
            o[i] = entry[moved[i].column * b];
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) pushed += change[i] * o[i];
    return pushed;
}

// The thread's entry of the listed changes times O.
__device__ float push(int total, const Block& own, const Room& room, int turn) {
    float pushed = 0.0f;
    if ((int)threadIdx.x >= own.b) return pushed;
    const float* entry = own.O + threadIdx.x;
    const Moved* moved = room.moved[turn];
    for (; total > 8; total -= 16, moved += 16)
        pushed = push_few<16>(pushed, moved, total, entry, own.b);
    if (total > 4)
        pushed = push_few<8>(pushed, moved, total, entry, own.b);
    else if (total > 0)
        pushed = push_few<4>(pushed, moved, total, entry, own.b);
    return pushed;
}

// Move the class `index`; `gradient` is already multiplied by O. All threads take part.
__device__ void move_class(int index, const Block& own, float curvature, float& step,
                           float& gradient, Room& room, int& turn) {
    float best = step;
    if ((int)threadIdx.x < own.b && threadIdx.x % CLASSES == index)
        best = clamped(rintf(step - gradient * own.inverse / curvature), -own.half_range,
                       own.half_range - 1.0f);
    float change = (best - step) * own.scale;
    for (int attempt = 0; attempt <= RETRIES; ++attempt) {
        turn ^= 1;
        const int total = list_moved(change, room, turn);
        if (total == 0) return;
        const float pushed = push(total, own, room, turn);
        const float rise = sum_of_all((gradient + 0.5f * curvature * pushed) * change, room, turn);
        if (rise <= 0.0f) {
            gradient += curvature * pushed;
            if (change != 0.0f) step = best;
            return;
        }
        const float gain = -change * (curvature * change * own.diagonal + 2.0f * gradient);
        const float most = largest_of_all(gain, room, turn);
        if (gain < most * (attempt + 1) / RETRIES) change = 0.0f;
    }
}

// Top-k selection: the candidates of each piece of a row.
#include "sampler.cuh"

// The logits' order as unsigned integers above 0; -0.0 is 0.0.
__device__ __forceinline__ unsigned ordered(float x) {
    const int bits = __float_as_int(x);
    return (unsigned)(bits < 0 ? (int)(0x80000000u - (unsigned)bits) : bits) ^ 0x80000000u;
}

// The keys of the `most` likeliest ids of a piece, in any order; zeros where there are fewer.
// blockIdx is (piece, row).
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 2) select_likeliest(const Sampler s) {
    __shared__ int taken;
    overlap_launches();
    constexpr int EACH = PIECE / SELECT_THREADS;
    const bool is_adjusted = s.adjusted;
    const integer row = blockIdx.y;
    const float* x = is_adjusted ? s.adjusted + row * s.vocab : s.logits + row * s.step;
    const int first = blockIdx.x * PIECE + threadIdx.x, left = (int)s.vocab - first;
    const int most = (int)s.most;
    unsigned values[EACH], greatest = 0;
    int flags = 0, turn = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const bool is_one = j * SELECT_THREADS < left;
        const float value = is_one ? x[first + j * SELECT_THREADS] : 0;
        values[j] = is_one ? ordered(value) : 0;
        flags |= is_one ? flags_of(value) : 0;
        greatest = max(greatest, values[j]);
    }
    if (!is_adjusted) put_flags(s.flags + row * s.flagged + blockIdx.x, flags);
    greatest = greatest_of_cta(greatest);
    const auto reach = [&](unsigned bound) {
        int count = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j) count += values[j] >= bound;
        return count;
    };
    const Bound<unsigned> least = bound_of(32, greatest, most, turn, reach);
    // of equal logits those of the lowest ids: the highest places from the end of the piece
    const int end = PIECE - 1 - (int)threadIdx.x;
    int last = 0;
    if (!least.is_exact) {
        const int some = most - total_of_cta(reach(least.at + 1), turn);
        last = bound_of(14, PIECE - 1, some, turn, [&](int bound) {
            int count = 0;
#pragma unroll
            for (int j = 0; j < EACH; ++j)
                count += values[j] == least.at && j * SELECT_THREADS <= end - bound;
            return count;
        }).at;
    }
    Key* keys = s.keys + (row * s.pieces + blockIdx.x) * most;
    if (threadIdx.x == 0) taken = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const bool is_last = values[j] == least.at && j * SELECT_THREADS <= end - last;
        const unsigned falling = ~(unsigned)(first + j * SELECT_THREADS);
        if (values[j] > least.at || (values[j] && is_last))
            keys[atomicAdd(&taken, 1)] = (Key)values[j] << 32 | falling;
    }
    __syncthreads();
    for (int i = taken + threadIdx.x; i < most; i += blockDim.x) keys[i] = 0;
}

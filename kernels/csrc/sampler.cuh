// Arguments and reductions of the sampler's kernels. Rows are slots; `docs/concepts/decoding.md` has the order
// of the steps, reference/sampler.py and reference/logits.py have the formulas.
#include "exl2.cuh"
#include "early.cuh"

#define INFINITE __int_as_float(0x7f800000)

enum Setting { SETTINGS, COLUMNS };  // the columns of a slot's settings: names of `SamplingSettings`

typedef unsigned long long Key;  // of a candidate: its logit's ordered bits, then its falling id

// Arguments of a call; pointers that its steps do not need are null. A row of `history` has room + 1 ids.
struct Sampler {
    const float* logits;  // (rows, step), as given or adjusted
    const double *table, *draws;
    int *history, *counts;
    const int* active;
    double* mu;
    const integer *partner, *lead;
    const unsigned *allowed, *breakers, *ignored;
    const float* bias;
    double* norms;         // (rows, pieces, 2): the greatest logit, the sum of exp(l - greatest)
    short* lengths;        // (rows, room): of the repetition that ends there
    int* longest;          // (rows, stretches): of these
    float* adjusted;       // (rows, vocab)
    int* flags;            // (rows, flagged): see flags_of
    Key* keys;             // (rows, pieces, most)
    const float* ordered;  // (rows, most)
    const integer* order;  // (rows, most): ids
    double *scratch, *partial;
    unsigned* meetings;
    integer *ids, *top_ids;
    double *probabilities, *top_probabilities;
    integer rows, vocab, step, words, breaker_words, width, room;
    integer pieces, flagged, stretches, most, top, penalizes, mixes;
};

__device__ __forceinline__ bool has(const unsigned* words, integer id) {
    return words[id >> 5] >> (id & 31) & 1;
}

// Of a raw logit: bit 0 if it is NaN or +infinity, bit 1 if it is not excluded.
__device__ __forceinline__ int flags_of(float x) {
    return !(x < INFINITE) | (x > -INFINITE) << 1;
}

// Publish the flags of a CTA's logits.
__device__ __forceinline__ void put_flags(int* flags, int mine) {
    const int broken = __syncthreads_or(mine & 1), some = __syncthreads_or(mine & 2);
    if (threadIdx.x == 0) *flags = (broken != 0) | (some != 0) << 1;
}

// Sums and maxima over a CTA, the same in every thread and every run: of each warp, then in order.
template <bool GREATEST> __device__ __forceinline__ double both(double a, double b) {
    return GREATEST ? fmax(a, b) : a + b;
}
template <bool GREATEST> __device__ __forceinline__ double over_warp(double value) {
    for (int o = 16; o; o >>= 1) value = both<GREATEST>(value, __shfl_xor_sync(~0u, value, o));
    return value;
}
template <bool GREATEST> __device__ double over_cta(double value) {
    __shared__ double room[2][32];
    double* const mine = room[GREATEST];
    value = over_warp<GREATEST>(value);
    __syncthreads();  // others may still read the last result
    if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = value;
    __syncthreads();
    value = mine[0];
    for (int w = 1; w < (int)blockDim.x / 32; ++w) value = both<GREATEST>(value, mine[w]);
    return value;
}

template <class Number> __device__ Number greatest_of_cta(Number key) {
    __shared__ Number room[32];
    for (int o = 16; o; o >>= 1) key = max(key, __shfl_xor_sync(~0u, key, o));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = key;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; ++w) key = max(key, room[w]);
    return key;
}

// How many of the first n places a predicate holds for, one that holds up to some place. The lanes
// of a warp search together.
template <class Holds> __device__ __forceinline__ int leading(int n, Holds holds) {
    int low = 0, high = n;
    while (low < high) {
        const int step = (high - low + 31) / 32, at = low + (int)(threadIdx.x % 32) * step;
        const int many = __popc(__ballot_sync(~0u, at < high && holds(at)));
        high = min(high, low + many * step);
        low = many ? low + (many - 1) * step + 1 : high;
    }
    return low;
}

// The same between two places, by a thread alone.
template <class Holds>
__device__ __forceinline__ int first_without(int low, int high, Holds holds) {
    while (low < high) {
        const int middle = (low + high) / 2;
        if (holds(middle)) low = middle + 1;
        else high = middle;
    }
    return low;
}

__device__ __forceinline__ int total_of_cta(int count, int& turn) {
    __shared__ int counts[2][32];
    int* const mine = counts[turn ^= 1];  // others may still read the last ones
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = count;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return __reduce_add_sync(~0u, lane < (int)blockDim.x / 32 ? mine[lane] : 0);
}

// A bound that exactly `most` numbers of the CTA reach, else the greatest that more do;
// reach(bound) is how many of a thread's do. First is `greatest`, then bit after bit of `bits`.
template <class Number> struct Bound { Number at; bool is_exact; };
template <class Number, class Reach>
__device__ __forceinline__ Bound<Number> bound_of(int bits, Number greatest, int most, int& turn,
                                                  Reach reach) {
    Number found = 0;
#pragma unroll 1
    for (int bit = bits; bit >= 0; --bit) {
        const Number trial = bit == bits ? greatest : found | (Number)1 << bit;
        if (trial > greatest || trial == found) continue;
        const int total = total_of_cta(reach(trial), turn);
        if (total >= most) found = trial;
        if (total == most) return {found, true};
    }
    return {found, false};
}

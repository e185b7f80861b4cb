// Exchanges between GPUs of one host that are launches of their own.
#include "exl2.cuh"
#include "early.cuh"
#include "peers.cuh"

typedef unsigned u32;

// A thread has two pairs of the words of a warp, so each of its stores fills whole sectors.
constexpr int APART = 64, OF_WARP = 2 * APART;

__device__ __forceinline__ integer first_word() {
    return grid_thread() / 32 * OF_WARP + threadIdx.x % 32 * 2;
}
__device__ __forceinline__ integer warp_at(integer at) { return at - threadIdx.x % 32 * 2; }
__device__ __forceinline__ integer word_at(integer at, int i) { return at + i / 2 * APART + i % 2; }

// Four words of `n`, zeros behind the end.
__device__ __forceinline__ uint4 words_at(const u32* from, integer at, integer n) {
    u32 v[4] = {};
    if (word_at(at, 3) < n) {
        const uint2 low = *(const uint2*)(from + at), high = *(const uint2*)(from + at + APART);
        return {low.x, low.y, high.x, high.y};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (word_at(at, i) < n) v[i] = from[word_at(at, i)];
    return {v[0], v[1], v[2], v[3]};
}

// y fp16 = hidden + multiplier · Σ of all ranks' x fp32, in their order; n of each. hidden: or null.
extern "C" __global__ void exchange_sums(const __grid_constant__ Peers p, const u32* x,
                                         const half_bits* hidden, half_bits* y, integer n,
                                         float multiplier) {
    let_the_next_begin();
    const integer first = first_word(), step = 4 * (integer)gridDim.x * blockDim.x;
    wait_for_input();
    const Exchange exchange(p);
    for (integer at = first; warp_at(at) < n; at += step)
        exchange.send(at, words_at(x, at, n), APART);
    for (integer at = first; warp_at(at) < n; at += step) {
        half_bits old[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (hidden && word_at(at, i) < n) old[i] = hidden[word_at(at, i)];
        float sum[4];
        for (int r = 0; r < p.count; ++r) {
            const uint4 own = words_at(x, at, n);
            u32 v[4] = {own.x, own.y, own.z, own.w};
            if (r != p.rank) exchange.receive(r, at, v, APART);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float part = __uint_as_float(v[i]);
                sum[i] = r ? __fadd_rn(sum[i], part) : part;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (word_at(at, i) < n)
                y[word_at(at, i)] = exchange.added(sum[i], multiplier, hidden, old[i]);
    }
    exchange.end();
}

// y (rows, columns of all ranks) = the columns of each, x; in words, of which rank r has begins[r + 1]
// - begins[r] a row. to: where the halves of a row of y go, or null: in order.
extern "C" __global__ void exchange_columns(const __grid_constant__ Peers p, const u32* x, u32* y,
                                            const int* begins, const int* to, integer rows) {
    __shared__ int starts[MOST_RANKS + 1];
    let_the_next_begin();
    const integer first = first_word(), step = 4 * (integer)gridDim.x * blockDim.x;
    if ((int)threadIdx.x <= p.count) starts[threadIdx.x] = begins[threadIdx.x];
    __syncthreads();
    const int all = starts[p.count];
    auto words_of = [&](int r) { return (u32)(starts[r + 1] - starts[r]); };
    const integer own = rows * words_of(p.rank);
    wait_for_input();
    const Exchange exchange(p);
    for (integer at = first; warp_at(at) < own; at += step)
        exchange.send(at, words_at(x, at, own), APART);
    for (int turn = 0; turn < p.count; ++turn) {
        const int r = (p.rank + turn) % p.count;
        const u32 each = words_of(r);
        const integer n = rows * each;
        for (integer at = first; warp_at(at) < n; at += step) {
            integer rows_at[4];
            int2 places[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // before the wait
                const u32 word = (u32)word_at(at, i);
                rows_at[i] = (integer)(word / each) * all;
                const int place = starts[r] + word % each;
                if (!to) places[i].x = place;
                else if (word < n) places[i] = {__ldg(to + 2 * place), __ldg(to + 2 * place + 1)};
            }
            u32 v[4];
            if (turn) {
                exchange.receive(r, at, v, APART);
            } else {
                const uint4 mine = words_at(x, at, n);
                v[0] = mine.x, v[1] = mine.y, v[2] = mine.z, v[3] = mine.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (word_at(at, i) >= n) continue;
                if (!to) {
                    y[rows_at[i] + places[i].x] = v[i];
                    continue;
                }
                half_bits* of_row = (half_bits*)y + 2 * rows_at[i];
                of_row[places[i].x] = (half_bits)v[i];
                of_row[places[i].y] = (half_bits)(v[i] >> 16);
            }
        }
    }
    exchange.end();
}

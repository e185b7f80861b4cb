// Exchanges of a decode step between GPUs of one host: each writes what it has into a box in the
// memory of every other one, beside each 4 bytes the number of the exchange, and reads its own boxes
// until that number is there. So one way through the link is all the time it takes, and there are no
// fences. A box has two halves, for odd and for even numbers: who writes the next but one has read
// the next, which the reader wrote after it had read this one.
#include "exl2.cuh"
#include "early.cuh"

typedef unsigned u32;
typedef unsigned long long Word;

struct Peers {
    Word** boxes;        // [rank] in its memory: [number % 2][sender][room]
    unsigned* counters;  // [CTA] number of the last exchange; behind them: not 0 after a failure
    int* failed;         // the same in main memory
    integer patience;    // ns
    int rank, count, room;
};

struct Exchange {
    const Peers& p;
    u32 number;
    bool is_lost;  // an earlier one has failed: waiting is in vain

    __device__ __forceinline__ explicit Exchange(const Peers& p) : p(p) {
        number = p.counters[blockIdx.x] + 1, is_lost = p.counters[EXCHANGE_CTAS];
        if (!number) number = 2;  // 0 stands beside what nobody wrote
    }
    __device__ __forceinline__ Word* box(int of, int from) const {
        return p.boxes[of] + ((integer)(number % 2) * p.count + from) * p.room;
    }
    // Send 4 words, place `at` of all.
    __device__ __forceinline__ void send(integer at, uint4 v) const {
        const Word beside = (Word)number << 32;
        for (int r = 0; r < p.count; ++r) {
            if (r == p.rank) continue;
            Word* to = box(r, p.rank) + at;
            asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                         ::"l"(to), "l"(beside | v.x), "l"(beside | v.y) : "memory");
            asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                         ::"l"(to + 2), "l"(beside | v.z), "l"(beside | v.w) : "memory");
        }
    }
    // Wait for 4 words of another rank.
    __device__ __forceinline__ uint4 receive(int from, integer at) {
        const Word* box_at = box(p.rank, from) + at;
        Word w[4];
        for (u32 tries = 1; !read(box_at, w); ++tries)
            if (is_lost || (tries % 256 == 0 && is_late())) break;
        return {(u32)w[0], (u32)w[1], (u32)w[2], (u32)w[3]};
    }
    // Count the exchange; every thread of the CTA calls it.
    __device__ __forceinline__ void end() const {
        __syncthreads();
        if (threadIdx.x == 0) p.counters[blockIdx.x] = number;
        for (int i = gridDim.x + threadIdx.x; blockIdx.x == 0 && i < EXCHANGE_CTAS; i += blockDim.x)
            p.counters[i] = number;
    }

private:
    Word begun = 0;

    __device__ __forceinline__ bool read(const Word* from, Word* w) const {
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(w[0]), "=l"(w[1]) : "l"(from) : "memory");
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(w[2]), "=l"(w[3]) : "l"(from + 2) : "memory");
        bool is_there = true;
        for (int i = 0; i < 4; ++i) is_there &= (u32)(w[i] >> 32) == number;
        return is_there;
    }
    __device__ __noinline__ bool is_late() {
        Word now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (!begun) begun = now;
        if (now - begun < (Word)p.patience) return false;
        *(volatile int*)p.failed = 1;
        *(volatile unsigned*)(p.counters + EXCHANGE_CTAS) = 1;
        return is_lost = true;
    }
};

// Four words of `n`, zeros behind the end.
__device__ __forceinline__ uint4 words_at(const u32* from, integer at, integer n) {
    if (at + 4 <= n) return *(const uint4*)(from + at);
    u32 v[4] = {};
    for (int i = 0; at + i < n; ++i) v[i] = from[at + i];
    return {v[0], v[1], v[2], v[3]};
}

// y fp16 = hidden + multiplier · Σ of all ranks' x fp32, in their order; n of each. hidden: or null.
extern "C" __global__ void exchange_sums(const __grid_constant__ Peers p, const u32* x,
                                         const half_bits* hidden, half_bits* y, integer n,
                                         float multiplier) {
    let_the_next_begin();
    const integer first = 4 * grid_thread(), step = 4 * (integer)gridDim.x * blockDim.x;
    wait_for_input();
    Exchange exchange(p);
    for (integer at = first; at < n; at += step) exchange.send(at, words_at(x, at, n));
    for (integer at = first; at < n; at += step) {
        const int there = (int)(n - at < 4 ? n - at : 4);
        half_bits old[4] = {};
        for (int i = 0; hidden && i < there; ++i) old[i] = hidden[at + i];
        float sum[4];
        for (int r = 0; r < p.count; ++r) {
            const uint4 v = r == p.rank ? words_at(x, at, n) : exchange.receive(r, at);
            const float part[4] = {__uint_as_float(v.x), __uint_as_float(v.y),
                                   __uint_as_float(v.z), __uint_as_float(v.w)};
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = r ? __fadd_rn(sum[i], part[i]) : part[i];
        }
        for (int i = 0; i < there; ++i) {
            float value = __fmul_rn(sum[i], multiplier);
            if (hidden) value = __fadd_rn(from_half(old[i]), value);
            y[at + i] = to_half(value);
        }
    }
    exchange.end();
}

// y (rows, columns of all ranks) = the columns of each, x; in words, of which rank r has begins[r + 1]
// - begins[r] a row. to: where the halves of a row of y go, or null: in order.
extern "C" __global__ void exchange_columns(const __grid_constant__ Peers p, const u32* x, u32* y,
                                            const int* begins, const int* to, integer rows) {
    let_the_next_begin();
    const integer first = 4 * grid_thread(), step = 4 * (integer)gridDim.x * blockDim.x;
    const int all = begins[p.count];
    auto words_of = [&](int r) { return (u32)(begins[r + 1] - begins[r]); };
    const integer own = rows * words_of(p.rank);
    wait_for_input();
    Exchange exchange(p);
    for (integer at = first; at < own; at += step) exchange.send(at, words_at(x, at, own));
    for (int turn = 0; turn < p.count; ++turn) {
        const int r = (p.rank + turn) % p.count;
        const u32 each = words_of(r);
        const integer n = rows * each;
        for (integer at = first; at < n; at += step) {
            const uint4 v = turn ? exchange.receive(r, at) : words_at(x, at, n);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            for (int i = 0; i < 4 && at + i < n; ++i) {
                const u32 row = (u32)(at + i) / each, column = begins[r] + (u32)(at + i) % each;
                if (!to) {
                    y[(integer)row * all + column] = words[i];
                    continue;
                }
                half_bits* of_row = (half_bits*)y + (integer)row * all * 2;
                of_row[to[2 * column]] = (half_bits)words[i];
                of_row[to[2 * column + 1]] = (half_bits)(words[i] >> 16);
            }
        }
    }
    exchange.end();
}

// The experts of up to 32 rows, after route.cu: gate, up and activation in a launch, then down, its
// weights and the sum. A CTA has adjacent units: two tiles of an item's expert, whose rows its warps
// share. docs/concepts/experts.md describes who computes what.
#include "halves.cuh"
#include "activations.cuh"
#include "ring.cuh"
#include "early.cuh"
#include "experts.cuh"

constexpr int WARPS = EXPERT_WARPS, THREADS = 32 * WARPS, OF_TILE = WARPS / 2;  // warps of a tile
constexpr int SLOT = STEP + BLOCK_PANELS * 32;
constexpr int STRIDE = TILE_COLUMNS + 4;  // of sums, so that lanes do not conflict in a bank
constexpr int OF_WARP = ITEM_ROWS * STRIDE;

// A unit of a CTA, and the ones that follow it.
template <bool DOWN> struct Cursor {
    const Experts& e;
    Item item;
    int index, unit, left;  // the item; its unit; the CTA's units from here on
    const Side* side;

    __device__ __forceinline__ Cursor(const Experts& e, int index, int first, int count)
        : e(e), index(index), left(count) {
        if (!left) return;
        open();
        unit = first - item.units[DOWN];
    }
    __device__ __forceinline__ void open() {
        const int* from = (const int*)(e.items + index);
        item = {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2), {__ldcg(from + 3), __ldcg(from + 4)}};
        const Expert& of = e.of[item.expert];
        side = DOWN ? &of.down : &of.up;
        unit = 0;
    }
    __device__ __forceinline__ void next() {
        if (--left && ++unit == side->pairs * side->parts) ++index, open();
    }
    __device__ __forceinline__ int part() const { return DOWN ? unit / side->pairs : 0; }
    __device__ __forceinline__ int pair() const { return DOWN ? unit % side->pairs : unit; }
    __device__ __forceinline__ int tile(int half) const { return DOWN ? 2 * pair() + half : unit; }
};

// A warp's steps of all its units.
template <bool DOWN> struct Fetcher {
    Cursor<DOWN> at;
    const byte* words;
    const int4 *step, *end;
    int half, of_tile;

    __device__ __forceinline__ Fetcher(const Cursor<DOWN>& begin) : at(begin) {
        half = threadIdx.x / 32 / OF_TILE, of_tile = threadIdx.x / 32 % OF_TILE;
        if (at.left) open();
    }
    // the first steps from here on
    __device__ __forceinline__ void open() {
        for (;;) {
            const Side& side = *at.side;
            const int list = DOWN ? at.part() : half, tile = at.tile(half);
            step = side.steps + side.begins[list] + of_tile, end = side.steps + side.begins[list + 1];
            words = side.words[half] + (integer)tile * side.tile_bytes[half];
            if (step < end && (!DOWN || tile * TILE_COLUMNS < at.e.size)) return;
            at.next();
            if (!at.left) return;
        }
    }
    __device__ __forceinline__ void next(u32 barrier, u32 slot) {
        if (!at.left) return;
        const int4 one = __ldg(step);
        fetch(Step(one.x, 32), barrier, slot, words + one.y);
        step += OF_TILE;
        if (step < end) return;
        at.next();
        if (at.left) open();
    }
};

// Put the rows of an item into shared memory, as `multiply` reads them.
template <bool DOWN>
__device__ __forceinline__ void stage_rows(const Experts& e, const Cursor<DOWN>& at, byte* xs) {
    const Item& item = at.item;
    if constexpr (DOWN) {
        const Expert& of = e.of[item.expert];
        const int begin = at.part() * e.part_rows, pieces = min(e.part_rows, of.inner - begin) / 8;
        for (int i = threadIdx.x; i < pieces * item.rows; i += THREADS) {
            const int row = i / pieces, c = i % pieces;
            const half_bits* from = e.inner + (integer)(item.first + row) * e.most_inner + begin;
            *(uint4*)(xs + staged_at(8 * c) + row * 64) = __ldcg((const uint4*)from + c);
        }
    } else {
        const half_bits* place = e.of[item.expert].place;
        for (int c = threadIdx.x; c < e.size / 8; c += THREADS) {
            const uint4 to = __ldg((const uint4*)place + c);
            const u32 places[4] = {to.x, to.y, to.z, to.w};
            for (int row = 0; row < item.rows; ++row) {
                const int assigned = __ldcg(e.assigned + item.first + row);
                uint4 v = __ldcg((const uint4*)(e.x + (integer)(assigned / e.slots) * e.size) + c);
                u32 pairs[4] = {v.x, v.y, v.z, v.w};
                if (e.scales_input && assigned % e.slots < e.top) {
                    const u32 weight = to_half(__ldcg(e.weights + assigned));
                    for (int i = 0; i < 4; ++i) pairs[i] = times(pairs[i], twice(weight));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    byte* own = xs + row * 64;
                    *(half_bits*)(own + staged_at(places[i] & 0xffff)) = (half_bits)pairs[i];
                    *(half_bits*)(own + staged_at(places[i] >> 16)) = (half_bits)(pairs[i] >> 16);
                }
            }
        }
    }
}

// Store a warp's sums of a tile: [row][column].
__device__ __forceinline__ void put(const float (*total)[4], float* to) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[(2 * t + i % 2) * STRIDE + 16 * m + 8 * (i / 2) + g] = total[m][i];
}

__device__ __forceinline__ float summed(const float* sums, int half, int row, int column) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < OF_TILE; ++w)
        value += sums[(half * OF_TILE + w) * OF_WARP + row * STRIDE + column];
    return value;
}

// Write what down reads.
__device__ __forceinline__ void finish_up(const Experts& e, const Cursor<false>& at,
                                          const float* sums) {
    const Item& item = at.item;
    const Expert& of = e.of[item.expert];
    for (int i = threadIdx.x; i < item.rows * TILE_COLUMNS; i += THREADS) {
        const int row = i / TILE_COLUMNS, column = at.pair() * TILE_COLUMNS + i % TILE_COLUMNS;
        if (column >= of.inner) continue;
        float gate = summed(sums, 0, row, i % TILE_COLUMNS);
        float up = summed(sums, 1, row, i % TILE_COLUMNS);
        if (of.bias[0]) gate += from_half(of.bias[0][column]);
        if (of.bias[1]) up += from_half(of.bias[1][column]);
        gate = from_half(to_half(gate)), up = from_half(to_half(up));
        const float y = e.activation ? activated(e.activation, gate) * up : clamped_swiglu(gate, up);
        e.inner[(integer)(item.first + row) * e.most_inner + of.to[column]] = to_half(y);
    }
}

// Write what a part of an expert adds to its rows; the last one of a row adds them up in order.
__device__ __forceinline__ void finish_down(const Experts& e, const Cursor<true>& at,
                                            const float* sums) {
    __shared__ u32 complete;
    const Item& item = at.item;
    const Expert& of = e.of[item.expert];
    const int first = at.pair() * 2 * TILE_COLUMNS, pairs = at.side->pairs, part = at.part();
    for (int i = threadIdx.x; i < item.rows * 2 * TILE_COLUMNS; i += THREADS) {
        const int row = i / (2 * TILE_COLUMNS), c = i % (2 * TILE_COLUMNS), column = first + c;
        if (column >= e.size) continue;
        const int assigned = __ldcg(e.assigned + item.first + row), slot = assigned % e.slots;
        float value = summed(sums, c / TILE_COLUMNS, row, c % TILE_COLUMNS);
        if (of.bias[2] && part == 0) value += from_half(of.bias[2][column]);
        if (!e.scales_input || slot == e.top) value *= __ldcg(e.weights + assigned);
        const int share = slot * e.of[0].down.parts + part;
        __stcg(e.partial + ((integer)(assigned / e.slots) * e.shares + share) * e.size + column, value);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        bool is_last = false;
        if ((int)threadIdx.x < item.rows) {
            const int row = __ldcg(e.assigned + item.first + threadIdx.x) / e.slots;
            int* arrived = e.arrived + 1 + row * pairs + at.pair();
            __threadfence();
            is_last = atomicAdd(arrived, 1) == e.shares - 1;
            __threadfence();
            if (is_last) *arrived = 0;
        }
        const u32 lasts = __ballot_sync(~0u, is_last);
        if (threadIdx.x == 0) complete = lasts;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < item.rows * 2 * TILE_COLUMNS; i += THREADS) {
        const int own = i / (2 * TILE_COLUMNS), column = first + i % (2 * TILE_COLUMNS);
        if (!(complete >> own & 1) || column >= e.size) continue;
        const integer row = __ldcg(e.assigned + item.first + own) / e.slots;
        float sum = 0.0f;
#pragma unroll 4
        for (int share = 0; share < e.shares; ++share)
            sum += __ldcg(e.partial + (row * e.shares + share) * e.size + column);
        const float before = from_half(__ldcg(e.hidden + row * e.size + column));
        e.sum[row * e.size + column] = to_half(before + from_half(to_half(sum * e.multiplier)));
    }
}

template <bool DOWN> __device__ __forceinline__ void run(const Experts& e) {
    extern __shared__ __align__(128) byte shared[];
    __shared__ int begin;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    byte* ring = shared + warp * e.ring_slots * SLOT;
    byte* xs = shared + WARPS * e.ring_slots * SLOT;
    float* sums = (float*)(xs + e.x_bytes);
    Barrier* barriers = (Barrier*)(sums + WARPS * OF_WARP);
    const u32 ring_at = shared_address(ring);
    const u32 barrier = shared_address(barriers + warp * e.ring_slots);
    let_the_next_begin();
    if (lane < e.ring_slots) begin_barrier(barrier + 8 * lane);
    end_barriers();
    wait_for_input();
    const int items = __ldcg(e.totals), units = __ldcg(e.totals + 1 + DOWN);
    const int first = (integer)units * blockIdx.x / gridDim.x;
    const int count = (int)((integer)units * (blockIdx.x + 1) / gridDim.x) - first;
    if (!count) return;
    for (int i = threadIdx.x; i < items; i += THREADS) {
        const int own = __ldcg(e.items[i].units + DOWN);
        const int next = i + 1 < items ? __ldcg(e.items[i + 1].units + DOWN) : units;
        if (own <= first && first < next) begin = i;
    }
    __syncthreads();
    Cursor<DOWN> at(e, begin, first, count);
    Fetcher<DOWN> fetcher(at);
    for (int s = 0; s < e.ring_slots; ++s) fetcher.next(barrier + 8 * s, ring_at + s * SLOT);
    int slot = 0, parity = 0, staged = -1, staged_part = -1;
    for (; at.left; at.next()) {
        if (staged != at.index || staged_part != at.part()) {
            staged = at.index, staged_part = at.part();
            stage_rows(e, at, xs);
            __syncthreads();
        }
        const int half = warp / OF_TILE, list = DOWN ? staged_part : half;
        const int4* step = at.side->steps + at.side->begins[list] + warp % OF_TILE;
        const int4* end = at.side->steps + at.side->begins[list + 1];
        float total[1][2][4] = {};
        if (DOWN && at.tile(half) * TILE_COLUMNS >= e.size) step = end;
        for (; step < end; step += OF_TILE) {
            const int4 one = __ldg(step);
            const byte* codes = ring + slot * SLOT;
            const byte* scales = codes + (one.x & 15) * (one.x >> 4 & 7) * 128;
            const byte* from = xs + one.z * ITEM_ROWS * 64;
            wait_for_bytes(barrier + 8 * slot, parity);
#define CASE(B) multiply<B, ITEM_ROWS, false>(codes, scales, from, one.x, lane, total)
            FOR_BITS(one.x & 15, CASE)
            __syncwarp();
            fetcher.next(barrier + 8 * slot, ring_at + slot * SLOT);
            if (++slot == e.ring_slots) slot = 0, parity ^= 1;
        }
        put(total[0], sums + warp * OF_WARP);
        __syncthreads();
        if constexpr (DOWN) finish_down(e, at, sums);
        else finish_up(e, at, sums);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    experts_up(const __grid_constant__ Experts e) {
    run<false>(e);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    experts_down(const __grid_constant__ Experts e) {
    run<true>(e);
}

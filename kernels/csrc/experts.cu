// A layer of experts for up to 32 rows: CTAs route them, meet, multiply by gate and up, meet, multiply
// by down, meet, and add up what the experts of a row return. A CTA has adjacent units: two tiles of an item's expert, whose rows its warps
// share. docs/concepts/experts.md describes who computes what.
#include "halves.cuh"
#include "panels.cuh"
#include "input.cuh"
#include "activations.cuh"
#include "ring.cuh"
#include "early.cuh"
#include "peers.cuh"
#include "experts.cuh"

constexpr int WARPS = EXPERT_WARPS, THREADS = 32 * WARPS, OF_TILE = WARPS / 2;  // warps of a tile
constexpr int SLOT = STEP + BLOCK_PANELS * 32;
constexpr int STRIDE = TILE_COLUMNS + 4;  // of sums, so that lanes do not conflict in a bank
constexpr int OF_WARP = ITEM_ROWS * STRIDE;

#include "route.cuh"

__device__ __forceinline__ Item item_at(const Experts& e, int index) {
    const int4* from = (const int4*)(e.items + index);
    const int4 low = __ldcg(from), high = __ldcg(from + 1);
    return {low.x, low.y, low.z, {low.w, high.x}, {high.y, high.z}, 0};
}

// Where a CTA's units begin: of gate and up, and of down.
struct Begin {
    Item item;
    int index, first, count;  // of the item; the unit; how many
};

// A unit of a CTA, and the ones that follow it.
struct Cursor {
    const Experts& e;
    const Side* side;
    int index, unit, units, left;  // the item; its unit, and how many; the CTA's units from here on
    int pairs;
    bool down;

    __device__ __forceinline__ Cursor(const Experts& e, const Begin& begin, bool down)
        : e(e), down(down) {
        start(begin);
    }
    __device__ __forceinline__ void start(const Begin& begin) {
        index = begin.index, left = begin.count;
        if (!left) return;
        open(begin.item);
        unit = begin.first - begin.item.begin[down];
    }
    __device__ __forceinline__ void open(const Item& item) {
        const Expert& of = e.of[item.expert];
        side = down ? &of.down : &of.up;
        pairs = __ldg(&side->pairs), unit = 0, units = item.count[down];
    }
    __device__ __forceinline__ void next() {
        if (--left && ++unit == units) open(item_at(e, ++index));
    }
    __device__ __forceinline__ int part() const { return down ? unit / pairs : 0; }
    __device__ __forceinline__ int pair() const { return down ? unit % pairs : unit; }
    __device__ __forceinline__ int tile(int half) const { return down ? 2 * pair() + half : unit; }
    // whether a half has a tile: hidden states may have an odd number
    __device__ __forceinline__ bool has(int half) const {
        return !down || tile(half) * TILE_COLUMNS < e.size;
    }
    __device__ __forceinline__ int begin(int list) const { return __ldg(side->begins + list); }
};

// A warp's steps of all its units, those of down after those of gate and up.
struct Fetcher {
    Cursor at;
    const byte* words;
    const int4* step;
    int left;  // steps of the tile, of all its warps

    __device__ __forceinline__ Fetcher(const Experts& e, const Begin* begins)
        : at(e, begins[0], false) {
        open(begins);
    }
    __device__ __forceinline__ void open(const Begin* begins) {  // the first steps from here on
        const int half = threadIdx.x / 32 / OF_TILE, of_tile = threadIdx.x / 32 % OF_TILE;
        for (;; at.next()) {
            if (!at.left) {
                if (at.down) return;
                at.down = true, at.start(begins[1]);
                if (!at.left) return;
            }
            const int list = at.down ? at.part() : half, begin = at.begin(list) + of_tile;
            step = at.side->steps + begin, left = at.begin(list + 1) - begin;
            words = at.side->words[half] + (integer)at.tile(half) * at.side->tile_bytes[half];
            if (left > 0 && at.has(half)) return;
        }
    }
    __device__ __forceinline__ void next(const Begin* begins, u32 barrier, u32 slot) {
        if (!at.left) return;
        const int4 one = __ldg(step);
        fetch(Step(one.x, 32), barrier, slot, words + one.y);
        step += OF_TILE, left -= OF_TILE;
        if (left > 0) return;
        at.next();
        open(begins);
    }
};

// Where a number of an item's row belongs in shared memory: one row is compact.
__device__ __forceinline__ int place_in_row(int place, int rows) {
    return rows == 1 ? 2 * place : staged_at(place);
}

// Turn a row into 16-bit numbers of its panels with units, as products of one row read it.
__device__ __forceinline__ void quantize_row(byte* xs, Unit* units, int pieces) {
    for (int base = threadIdx.x / 32 * 32; base < pieces; base += THREADS) {
        const int c = base + threadIdx.x % 32;
        uint4 v = {};
        if (c < pieces) v = paired(((const uint4*)xs)[c]);  // in order again
        __syncwarp();  // the four lanes of a panel have read it before one of them writes over it
        float numbers[8];
        u32 planes[2][2];
        pairs_of(v, numbers);
        const Unit unit = quantize(numbers, planes);
        if (c >= pieces) continue;
        byte* to = xs + c / 4 * 64 + c % 4 * 8;
        *(uint2*)to = {planes[0][0], planes[0][1]};
        *(uint2*)(to + 32) = {planes[1][0], planes[1][1]};
        if (c % 4 == 0) units[c / 4] = unit;
    }
}

// Put the rows of an item into shared memory, as `multiply` reads them.
__device__ __forceinline__ void stage_rows(const Experts& e, const Cursor& at, const Item& item,
                                           byte* xs, Unit* units) {
    int pieces = e.size / 8;
    if (at.down) {
        const int begin = at.part() * e.part_rows;
        pieces = min(e.part_rows, __ldg(&e.of[item.expert].inner) - begin) / 8;
        for (int row = 0; row < item.rows; ++row) {
            const half_bits* from = e.inner + (integer)(item.first + row) * e.most_inner + begin;
            for (int c = threadIdx.x; c < pieces; c += THREADS)
                *(uint4*)(xs + place_in_row(8 * c, item.rows) + row * 64) =
                    __ldcg((const uint4*)from + c);
        }
    } else {
        const half_bits* place = e.of[item.expert].place;
        for (int c = threadIdx.x; c < pieces; c += THREADS) {
            const uint4 to = __ldg((const uint4*)place + c);
            const u32 places[4] = {to.x, to.y, to.z, to.w};
            for (int row = 0; row < item.rows; ++row) {
                const int assigned = __ldcg(e.assigned + item.first + row);
                uint4 v = __ldcg((const uint4*)(e.x + (integer)(assigned / e.slots) * e.size) + c);
                u32 pairs[4] = {v.x, v.y, v.z, v.w};
                if (e.scales_input && item.expert < e.held) {
                    const u32 weight = to_half(__ldcg(e.weights + assigned));
                    for (int i = 0; i < 4; ++i) pairs[i] = times(pairs[i], twice(weight));
                }
                byte* own = xs + row * 64;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int low = places[i] & 0xffff, high = places[i] >> 16;
                    *(half_bits*)(own + place_in_row(low, item.rows)) = (half_bits)pairs[i];
                    *(half_bits*)(own + place_in_row(high, item.rows)) = (half_bits)(pairs[i] >> 16);
                }
            }
        }
    }
    if (item.rows > 1) return;
    __syncthreads();
    quantize_row(xs, units, pieces);
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

// The same of one row: a lane has the sums of every fourth panel, of columns 8 c + g.
__device__ __forceinline__ void put_row(const float* total, float* to) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float own = 0.0f;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        float sum = total[c];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (c == t) own = sum;
    }
    to[8 * t + g] = own;
}

// What a thread writes of a unit, row threadIdx.x / 32 of the item: of gate and up one column, of
// down one of each tile. Some of it is read before the sums are complete.
struct Ending {
    int to, assigned;
    float weight;

    __device__ __forceinline__ Ending(const Experts& e, const Cursor& at, const Item& item)
        : to(0), assigned(-1), weight(1.0f) {
        const Expert& of = e.of[item.expert];
        const int row = threadIdx.x / 32, column = at.tile(0) * TILE_COLUMNS + threadIdx.x % 32;
        if (row >= item.rows) return;
        assigned = __ldcg(e.assigned + item.first + row);
        if (!at.down && column < __ldg(&of.inner)) to = __ldg(of.to + column);
        if (at.down && !(e.scales_input && item.expert < e.held))
            weight = __ldcg(e.weights + assigned);
    }

    __device__ __forceinline__ void finish(const Experts& e, const Cursor& at, const Item& item,
                                           const float* sums) const {
        if (assigned < 0) return;
        const Expert& of = e.of[item.expert];
        const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int width = at.down ? e.size : __ldg(&of.inner);
        float value[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = at.tile(half) * TILE_COLUMNS + lane;
            const half_bits* bias = at.part() == 0 ? of.bias[at.down ? 2 : half] : nullptr;
            value[half] = bias && column < width ? from_half(__ldg(bias + column)) : 0.0f;
#pragma unroll
            for (int w = 0; w < OF_TILE; ++w)
                value[half] += sums[(half * OF_TILE + w) * OF_WARP + row * STRIDE + lane];
        }
        if (at.down) {
            const int share = assigned % e.slots * __ldg(&e.of[0].down.parts) + at.part();
            float* sum = e.partial + ((integer)(assigned / e.slots) * e.shares + share) * e.size;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = at.tile(half) * TILE_COLUMNS + lane;
                if (column < width) __stcg(sum + column, value[half] * weight);
            }
        } else if (at.tile(0) * TILE_COLUMNS + lane < width) {
            const float gate = from_half(to_half(value[0])), up = from_half(to_half(value[1]));
            const float y = e.activation ? activated(e.activation, gate) * up : clamped_swiglu(gate, up);
            e.inner[(integer)(item.first + row) * e.most_inner + to] = to_half(y);
        }
    }
};

// Add up what the experts of a row return, in order; a thread has 8 columns. If some are elsewhere,
// their sum is the result, or is added to those of other ranks.
__device__ __forceinline__ void combine(const Experts& e, const Exchange& exchange) {
    const int pieces = e.size / 8;
    for (int i = threadIdx.x * gridDim.x + blockIdx.x; i < e.rows * pieces; i += gridDim.x * THREADS) {
        const int row = i / pieces, c = i % pieces;
        const int shares = e.places ? __ldcg(e.added + row) : e.shares;
        float sum[8] = {}, x[8];
#pragma unroll 4
        for (int share = 0; share < shares; ++share) {
            const float4* from =
                (const float4*)(e.partial + ((integer)row * e.shares + share) * e.size) + 2 * c;
            const float4 low = __ldcg(from), high = __ldcg(from + 1);
            sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
            sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
        }
        const bool is_shared = exchange.p.count > 0;
        if (e.places && !is_shared) {
            float4* to = (float4*)e.part + 2 * i;
            to[0] = {sum[0], sum[1], sum[2], sum[3]}, to[1] = {sum[4], sum[5], sum[6], sum[7]};
            continue;
        }
        pairs_of(__ldcg((const uint4*)e.hidden + i), x);
        if (is_shared) exchange.add(8 * i, sum);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float added = __fmul_rn(sum[j], e.multiplier);
            sum[j] = __fadd_rn(x[j], is_shared ? added : from_half(to_half(added)));
        }
        ((uint4*)e.sum)[i] = {halves(sum[0], sum[1]), halves(sum[2], sum[3]),
                              halves(sum[4], sum[5]), halves(sum[6], sum[7])};
    }
}

// Find where a CTA's units begin.
__device__ __forceinline__ void find(const Experts& e, Begin* begins) {
    const int4 totals = __ldcg((const int4*)e.totals);
    const integer units[2] = {totals.y, totals.z};
    int first[2], count[2];
#pragma unroll
    for (int down = 0; down < 2; ++down) {
        first[down] = units[down] * blockIdx.x / gridDim.x;
        count[down] = (int)(units[down] * (blockIdx.x + 1) / gridDim.x) - first[down];
        if (threadIdx.x == 0) begins[down].first = first[down], begins[down].count = count[down];
    }
    for (int i = threadIdx.x; i < e.rows * e.slots; i += THREADS) {
        const Item own = item_at(e, i);
#pragma unroll
        for (int down = 0; down < 2; ++down) {
            const int before = first[down] - own.begin[down];
            if (i < totals.x && before >= 0 && before < own.count[down])
                begins[down].item = own, begins[down].index = i;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    experts(const __grid_constant__ Experts e, const __grid_constant__ Peers p) {
    extern __shared__ __align__(128) byte shared[];
    __shared__ Begin begins[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / OF_TILE;
    byte* ring = shared + warp * e.ring_slots * SLOT;
    byte* xs = shared + WARPS * e.ring_slots * SLOT;
    Unit* units = (Unit*)(xs + e.x_bytes / 2);  // of one row, which is compact
    float* sums = (float*)(xs + e.x_bytes);  // of a unit, or of two in turn
    Barrier* barriers = (Barrier*)(sums + e.turns * WARPS * OF_WARP);
    const u32 ring_at = shared_address(ring);
    const u32 barrier = shared_address(barriers + warp * e.ring_slots);
    let_the_next_begin();
    if (lane < e.ring_slots) begin_barrier(barrier + 8 * lane);
    end_barriers();
    if (blockIdx.x < RouterShare::count(e)) RouterShare(e, blockIdx.x).begin(e);
    for (int i = grid_thread(); i * 128 < e.table_bytes; i += gridDim.x * THREADS)
        prefetch((const byte*)e.of + i * 128);
    wait_for_input();
    route(e, xs);
    meet(e.meetings, blockIdx.x, gridDim.x);
    find(e, begins);
    Fetcher fetcher(e, begins);
    for (int s = 0; s < e.ring_slots; ++s) fetcher.next(begins, barrier + 8 * s, ring_at + s * SLOT);
    int slot = 0, parity = 0, turn = 0;
#pragma unroll 1
    for (int down = 0; down < 2; ++down) {
        if (down) meet(e.meetings, blockIdx.x, gridDim.x);
        int staged = -1, staged_part = -1;
        Item item = begins[down].item;
#pragma unroll 1
        for (Cursor at(e, begins[down], down); at.left; at.next()) {
            if (staged >= 0 && staged != at.index) item = item_at(e, at.index);
            const Ending ending(e, at, item);
            if (staged != at.index || staged_part != at.part()) {
                staged = at.index, staged_part = at.part();
                stage_rows(e, at, item, xs, units);
                __syncthreads();
            }
            const int list = down ? staged_part : half;
            int step = at.begin(list) + warp % OF_TILE;
            const int end = at.has(half) ? at.begin(list + 1) : 0;
            const int4* steps = at.side->steps;
            float total[1][2][4] = {};
            for (; step < end; step += OF_TILE) {
                const int4 one = __ldg(steps + step);
                const byte* codes = ring + slot * SLOT;
                const byte* scales = codes + (one.x & 15) * (one.x >> 4 & 7) * 128;
                wait_for_bytes(barrier + 8 * slot, parity);
#define ONE(B) \
    multiply<B, 1, false>(codes, scales, xs + one.z * 64, units + one.z, one.x, lane, total[0][0])
#define SEVERAL(B) \
    multiply<B, ITEM_ROWS, false>(codes, scales, xs + one.z * ITEM_ROWS * 64, one.x, lane, total)
                if (item.rows == 1) {
                    FOR_BITS(one.x & 15, ONE)
                } else {
                    FOR_BITS(one.x & 15, SEVERAL)
                }
                __syncwarp();
                fetcher.next(begins, barrier + 8 * slot, ring_at + slot * SLOT);
                if (++slot == e.ring_slots) slot = 0, parity ^= 1;
            }
            float* own = sums + turn * WARPS * OF_WARP;
            if (item.rows == 1) put_row(total[0][0], own + warp * OF_WARP);
            else put(total[0], own + warp * OF_WARP);
            __syncthreads();  // x may be replaced now, and the sums of the unit before
            ending.finish(e, at, item, own);
            if (e.turns == 1) __syncthreads();
            else turn ^= 1;
        }
    }
    Exchange exchange(p, 0);
    if (p.count) exchange.begin();
    meet(e.meetings, blockIdx.x, gridDim.x);
    combine(e, exchange);
    if (p.count) exchange.end();
}

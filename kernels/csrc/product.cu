// y = x Q for 1 to 4 rows, one product or several in sequence: a CTA has whole tiles, and its
// warps have equal shares of their panels. docs/concepts/decoding.md describes who computes what.
#include "panels.cuh"
#include "input.cuh"
#include "activations.cuh"
#include "ring.cuh"
#include "early.cuh"
#include "work.cuh"

// Store a segment's sums as (rows, 32 columns). One row: a lane has those of every fourth panel.
template <int ROWS>
__device__ __forceinline__ void put(const float* total, int rows, float* to) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if constexpr (ROWS == 1) {
        float own = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float sum = total[c];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (c == t) own = sum;
        }
        to[8 * t + g] = own;
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (t < rows) to[t * TILE_COLUMNS + 8 * c + g] = total[c];
    }
}

// Where a CTA keeps the sums of a stage's tiles. last: per warp those of its last tile; ended: per tile
// those of a warp that goes on with another; warps: per tile the warps whose last it is, bit 31: whether
// one goes on.
struct Sums {
    const float *last, *ended;
    const u32* warps;
    int step;  // numbers of a tile

    __device__ __forceinline__ float of(int i, int row) const {
        const int place = row * TILE_COLUMNS + threadIdx.x % 32;
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < CTA_WARPS; ++w)
            if (warps[i] >> w & 1) value += last[w * step + place];
        return warps[i] >> 31 ? value + ended[i * step + place] : value;
    }
};

// Hand the sums of a row of a tile over to the CTA that ends it; i: the tile among the CTA's.
__device__ __forceinline__ void hand_over(const Stage& stage, const Work& work, const Sums& sums,
                                          int tile, int i, int row, int rows) {
    const integer piece = work.piece(stage, tile, work.part, work.before_of(tile));
    for (int j = 0; j < work.together; ++j)
        __stcg(work.of[j].partial + (piece * rows + row) * TILE_COLUMNS + threadIdx.x % 32,
               sums.of(i + j, row));
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence();
        atomicAdd(work.of->arrived + tile * rows + row, 1);
    }
}

// Add what other CTAs have of a row of a tile that this one ends.
__device__ __forceinline__ void add_others(const Stage& stage, const Work& work, int tile, int row,
                                           int rows, float* sums) {
    const int ctas = work.before_of(tile) + 1, others = stage.parts * ctas - 1;
    if (!others) return;
    if (threadIdx.x % 32 == 0) {
        int* arrived = work.of->arrived + tile * rows + row;
        int there;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(arrived) : "memory");
        } while (there != others);
        *arrived = 0;
    }
    __syncwarp();
    for (int part = 0, turn = 0, q = 0; q < others; ++q) {
        const integer at =
            (work.piece(stage, tile, part, turn) * rows + row) * TILE_COLUMNS + threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (j < work.together) sums[j] += __ldcg(work.of[j].partial + at);
        if (++turn == ctas) turn = 0, ++part;
    }
}

// Inputs of the epilogue of a column of a row, read before its sums are complete.
struct Ending {
    int column, to;
    bool is_there;
    half_bits added;

    __device__ __forceinline__ Ending(const Stage& stage, const Work& work, int unit, int rows)
        : to(0), added(0) {
        const Matrix& m = work.of[work.together - 1];
        column = (work.first + unit / rows) * TILE_COLUMNS + threadIdx.x % 32;
        is_there = unit < work.tiles * rows && column < m.columns;
        if (!is_there) return;
        if (m.copy) to = __ldg(stage.to + column);
        if (m.residual) added = __ldcg(m.residual + (integer)(unit % rows) * m.columns + column);
    }
};

// Add up the sums of each tile that the CTA ends, and write it: a warp has 32 columns of a row.
// first: the first ending of this warp; squares: see stage_x.
__device__ __forceinline__ void finish(const Stage& stage, const Work& work, int rows,
                                       const Sums& own, const Ending& first,
                                       const float (*squares)[CTA_WARPS]) {
    const int together = work.together;
    const Matrix &gating = work.of[0], &m = work.of[together - 1];
    for (int unit = threadIdx.x / 32; unit < work.tiles * rows; unit += CTA_WARPS) {
        const int row = unit % rows, tile = work.first + unit / rows, i = unit / rows * together;
        if (work.part + 1 < stage.parts) {
            hand_over(stage, work, own, tile, i, row, rows);
            continue;
        }
        const Ending end = unit >= CTA_WARPS ? Ending(stage, work, unit, rows) : first;
        float sums[2] = {own.of(i, row)};
        if (together == 2) sums[1] = own.of(i + 1, row);
        add_others(stage, work, tile, row, rows, sums);
        const integer at = (integer)row * m.columns;
        float value = together == 2 ? sums[1] : sums[0], gate = sums[0];
        if (stage.norm) {
            const float size = size_of(squares[row], stage.k, stage.eps);
            value *= size, gate *= size;
        }
        if (!end.is_there) continue;
        if (m.bias) value += from_half(m.bias[end.column]);
        value *= stage.multiplier;
        if (m.exact) m.exact[at + end.column] = value;
        half_bits y = to_half(value);
        if (together == 2) {
            if (gating.bias) gate += from_half(gating.bias[end.column]);
            y = to_half(activated(stage.activation, from_half(to_half(gate))) * from_half(y));
        }
        if (m.residual) y = to_half(from_half(end.added) + from_half(y));
        if (m.y) m.y[at + end.column] = y;
        if (m.copy) m.copy[at + end.to] = y;
    }
}

// Return whether this is the last of the CTA's warps to call; all have written before what it reads.
__device__ __forceinline__ bool is_last_warp(int* called) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence_block();
        before = atomicAdd(called, 1);
        __threadfence_block();
        if (before == CTA_WARPS - 1) *called = 0;
    }
    return __shfl_sync(~0u, before, 0) == CTA_WARPS - 1;
}

// ROWS: 1 or 4, for at most so many rows of x.
template <int ROWS, bool GPTQ>
__global__ void __launch_bounds__(32 * CTA_WARPS, 1) product(const __grid_constant__ Chain c) {
    constexpr int SCALE_BYTES = GPTQ ? 128 : 32;
    extern __shared__ __align__(128) byte shared[];
    __shared__ float squares[ROWS][CTA_WARPS];
    __shared__ u32 warps[MOST_TILES];  // see Sums
    __shared__ int called;             // see is_last_warp
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    let_the_next_begin();

    int4 places[2];  // of the first piece of x that this thread moves: before memory is busy
    if (c.stages[0].place && (int)threadIdx.x < c.stages[0].k / 8)
        places_of(c.stages[0], threadIdx.x, places);
    byte* ring = shared + warp * c.slots * c.slot_bytes;
    int4* shares = (int4*)(shared + CTA_WARPS * c.slots * c.slot_bytes);
    int2* lists = (int2*)(shares + c.count * (1 + CTA_WARPS));
    Barrier* barriers = (Barrier*)(lists + c.words);
    float* ended = (float*)(barriers + CTA_WARPS * c.slots);
    byte* xs = (byte*)(ended + c.tiles * c.rows * TILE_COLUMNS);
    float* last = (float*)xs;  // after x has been read
    for (int s = 0; s < c.count; ++s) {
        const Stage& stage = c.stages[s];
        const Place own(stage);
        if (!own.has_work(stage)) continue;
        const int2* list = own.of->lists + own.part * stage.words;
        for (int i = threadIdx.x; i < stage.words; i += 32 * CTA_WARPS)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                             shared_address(lists + stage.list_at + i)), "l"(list + i));
        const int i = threadIdx.x, row = own.part * own.of->ctas + own.cta;
        if (i <= CTA_WARPS)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(
                             shared_address(shares + s * (1 + CTA_WARPS) + i)),
                         "l"(own.of->shares + row * (1 + CTA_WARPS) + i));
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    const u32 ring_at = shared_address(ring), barrier = shared_address(barriers + warp * c.slots);
    if (lane < c.slots) begin_barrier(barrier + 8 * lane);
    end_barriers();
    if (threadIdx.x == 0) called = 0;
    __syncthreads();

    auto work_of = [&](int s) { return Work(c.stages[s], lists, shares + s * (1 + CTA_WARPS)); };
    Work ahead = work_of(0);  // the work to fetch, in all stages
    Walk next(ahead, true);
    const byte* next_words = 0;
    int next_run = 0;  // two of each stage
    auto open = [&]() {  // the first run that has steps
        while (next.left <= 0 && ++next_run < 2 * c.count) {
            if (next_run % 2 == 0) ahead = work_of(next_run / 2);
            next = Walk(ahead, next_run % 2 == 0);
        }
        if (next.left > 0) next_words = next.words(ahead);
    };
    open();
    auto fetch_next = [&](int slot) {
        if (next.left <= 0) return;
        const int2 step = *next.step;
        fetch(Step(step.x, SCALE_BYTES), barrier + 8 * slot, ring_at + slot * c.slot_bytes,
              next_words + (step.y & 0xfffff) * 16);
        const bool is_other = next.next(ahead, step.x);
        if (next.left <= 0) open();
        else if (is_other) next_words = next.words(ahead);
    };
    for (int s = 0; s < c.slots; ++s) fetch_next(s);
    auto prefetch_shared = [&](int s) {  // to L2, what the CTAs of a stage share
        const Stage& stage = c.stages[s];
        const Work work = work_of(s);
        const int line = threadIdx.x * 32;  // one line of 128 bytes per thread
        if (stage.norm && 2 * line < stage.k)
            prefetch(stage.norm + 2 * line);
        if (stage.after && 2 * line < stage.k)
            prefetch(stage.after + 2 * line);
        if (stage.after && line < stage.k)
            prefetch(stage.order + line);
        if (stage.place && line < stage.k)
            prefetch(stage.place + line);
        if (stage.to && warp == 0 && lane < work.tiles && lane * 32 < work.of->columns)
            prefetch(stage.to + min(work.first + lane, work.of->tiles - 1) * TILE_COLUMNS);
    };
    for (int s = 0; s < min(2, c.count); ++s) prefetch_shared(s);
    wait_for_input();

    int slot = 0, parity = 0;
#pragma unroll 1
    for (int s = 0; s < c.count; ++s) {
        const Stage& stage = c.stages[s];
        const Work work = work_of(s);
        unsigned met = 0;
        if (s) met = arrive(c.meetings, blockIdx.x, gridDim.x);
        if (s && s + 1 < c.count) prefetch_shared(s + 1);
        if (s && stage.place && !stage.after && (int)threadIdx.x < stage.k / 8)
            places_of(stage, threadIdx.x, places);
        if ((int)threadIdx.x < work.held * work.together) warps[threadIdx.x] = 0;
        if (ADDS<ROWS> && stage.after) load_hidden(stage, xs);
        if (s) await(c.meetings, met);
        // with hidden states all of x is there, else a part
        const int x_bytes = (stage.after ? stage.k / PANEL_ROWS : stage.length) * ROWS * 64;
        Unit* units = (Unit*)(xs + x_bytes);
        byte* x_at = xs + (stage.after ? work.part * stage.length * ROWS * 64 : 0);
        if (work.held)
            stage_x<ROWS>(stage, work.part, c.rows, places, xs, x_at, units, squares);
        float total[4];
        int i = 0;
        bool has_last = false;
        const int step_sums = c.rows * TILE_COLUMNS;
        float* begun = ended + c.tiles * step_sums - CTA_WARPS * step_sums;
#pragma unroll 1
        for (int run = !work.hands_over(); run < 2; ++run) {
            Walk walk(work, run == 0);
            has_last = walk.left > 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) total[j] = 0.0f;
            while (walk.left > 0) {
                const int2 step = *walk.step;
                const int panels = step.x >> 4 & 7, panel = (unsigned)step.y >> 20;
                const byte* codes = ring + slot * c.slot_bytes;
                const byte* scales = codes + (step.x & 15) * panels * 128;
                const byte* from = x_at + panel * ROWS * 64;
                const Unit* own_units = units + panel * ROWS;
                wait_for_bytes(barrier + 8 * slot, parity);
                if constexpr (GPTQ) {
                    multiply<4, ROWS, true>(codes, scales, from, own_units, step.x, lane, total);
                } else {
#define CASE(B) multiply<B, ROWS, false>(codes, scales, from, own_units, step.x, lane, total)
                    FOR_BITS(step.x & 15, CASE)
                }
                __syncwarp();
                fetch_next(slot);
                if (++slot == c.slots) slot = 0, parity ^= 1;
                i = (walk.tile - work.first) * work.together + walk.is_second;
                if (!walk.next(work, step.x) || walk.left <= 0) continue;
                put<ROWS>(total, c.rows, ended + i * step_sums);
                if (lane == 0) atomicOr(warps + i, 1u << 31);
#pragma unroll
                for (int j = 0; j < 4; ++j) total[j] = 0.0f;
            }
            if (has_last && lane == 0) atomicOr(warps + i, 1u << warp);
            if (run) break;
            if (has_last) put<ROWS>(total, c.rows, begun + warp * step_sums);
            if (!is_last_warp(&called)) continue;
            const Sums sums = {begun, ended, warps, step_sums};
            for (int row = 0; row < c.rows; ++row)
                hand_over(stage, work, sums, work.first + work.tiles, work.tiles * work.together,
                          row, c.rows);
        }
        const Ending ending(stage, work, warp, c.rows);
        __syncthreads();
        if (has_last) put<ROWS>(total, c.rows, last + warp * step_sums);
        __syncthreads();
        finish(stage, work, c.rows, {last, ended, warps, step_sums}, ending, squares);
    }
}

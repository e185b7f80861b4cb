// y = x Q for 1 to 4 rows, one product or several in sequence: a CTA has whole tiles, and its
// warps have equal shares of their panels. docs/concepts/decoding.md describes who computes what.
#include "panels.cuh"
#include "input.cuh"
#include "activations.cuh"
#include "ring.cuh"
#include "early.cuh"
#include "peers.cuh"
#include "work.cuh"

// Return whether this CTA is the last of `parts` to store its sums.
__device__ __forceinline__ bool is_last(int* arrived, int parts) {
    __shared__ int before;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(arrived, 1);
        __threadfence();
        if (before == parts - 1) *arrived = 0;
    }
    __syncthreads();
    return before == parts - 1;
}

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

// Inputs of the epilogue of a column of a row, read before its sums are complete.
struct Ending {
    int column, to;
    bool is_there;
    half_bits added;

    __device__ __forceinline__ Ending(const Stage& stage, const Work& work, int unit, int rows)
        : to(0), added(0) {
        const Matrix& m = work.of[work.together - 1];
        column = (work.first + unit / rows) * TILE_COLUMNS + threadIdx.x % 32;
        is_there = unit < work.tiles / work.together * rows && column < m.columns;
        if (!is_there) return;
        if (m.copy) to = __ldg(stage.to + column);
        if (m.residual) added = __ldcg(m.residual + (integer)(unit % rows) * m.columns + column);
    }
};

// Add up the warps' sums of each tile, and write it: a warp has 32 columns of a row.
// last: per warp the sums of its last segment; ended: per tile those of a warp that continues;
// first: the first ending of this warp; squares: see stage_x.
template <bool EXCHANGES>
__device__ __forceinline__ void finish(const Stage& stage, const Work& work, int rows,
                                       const float* last, const float* ended, const u32* warps,
                                       const Ending& first,
                                       const float (*squares)[CTA_WARPS],
                                       const Exchange& exchange) {
    const int lane = threadIdx.x % 32, together = work.together, step = rows * TILE_COLUMNS;
    const Matrix &gating = work.of[0], &m = work.of[together - 1];
    auto summed = [&](int i, int row) {
        const int place = row * TILE_COLUMNS + lane;
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < CTA_WARPS; ++w)
            if (warps[i] >> w & 1) value += last[w * step + place];
        return warps[i] >> 31 ? value + ended[i * step + place] : value;
    };
    const int units = work.tiles / together * rows;
    auto place_of = [&](int unit, int part) {
        const integer tile = work.first + unit / rows;
        return ((tile * stage.parts + part) * rows + unit % rows) * TILE_COLUMNS + lane;
    };
    if (stage.parts > 1 && units) {
        for (int unit = threadIdx.x / 32; unit < units; unit += CTA_WARPS) {
            const int row = unit % rows, i = unit / rows * together;
            __stcg(m.partial + place_of(unit, work.part), summed(i + together - 1, row));
            if (together == 2) __stcg(gating.partial + place_of(unit, work.part), summed(i, row));
        }
        if (!is_last(m.arrived + blockIdx.x % stage.ctas, stage.parts)) return;
    }
    constexpr int BATCH = 4;  // units whose sums a warp reads at a time
    float values[BATCH], gates[BATCH];
    for (int turn = 0; turn * CTA_WARPS < units; ++turn) {
        const int unit = turn * CTA_WARPS + threadIdx.x / 32;
        if (stage.parts > 1 && turn % BATCH == 0) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) values[i] = gates[i] = 0.0f;
            for (int q = 0; q < stage.parts; ++q)
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    if (unit + i * CTA_WARPS >= units) break;
                    const integer at = place_of(unit + i * CTA_WARPS, q);
                    values[i] += __ldcg(m.partial + at);
                    if (together == 2) gates[i] += __ldcg(gating.partial + at);
                }
        }
        if (unit >= units) break;
        const int row = unit % rows, i = unit / rows * together;
        const Ending end = turn ? Ending(stage, work, unit, rows) : first;
        const integer at = (integer)row * m.columns;
        float value = values[0], gate = gates[0];
        if (stage.parts == 1) {
            value = summed(i + together - 1, row);
            if (together == 2) gate = summed(i, row);
        }
#pragma unroll
        for (int j = 1; j < BATCH; ++j) values[j - 1] = values[j], gates[j - 1] = gates[j];
        if (stage.norm) {
            const float size = size_of(squares[row], stage.k, stage.eps);
            value *= size, gate *= size;
        }
        if (!end.is_there) continue;
        if (m.bias) value += from_half(m.bias[end.column]);
        if (EXCHANGES && stage.exchanges) {
            m.exact[at + end.column] = value;
            exchange.send(at + end.column, value);
            continue;
        }
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
    if constexpr (EXCHANGES) {
        for (int unit = threadIdx.x / 32; stage.exchanges && unit < units; unit += CTA_WARPS) {
            const Ending end = unit >= CTA_WARPS ? Ending(stage, work, unit, rows) : first;
            if (!end.is_there) continue;
            const integer of_row = (integer)(unit % rows) * m.columns, at = of_row + end.column;
            float sum = m.exact[at];
            const int place = (int)at;
            exchange.add<1>(&place, &end.is_there, &sum);
            const half_bits y = exchange.added(sum, stage.multiplier, m.residual, end.added);
            if (m.y) m.y[at] = y;
            if (m.copy) m.copy[of_row + end.to] = y;
        }
    }
}

// ROWS: 1 or 4, the most rows of x. EXCHANGES: whether ranks gather x or add up a result.
template <int ROWS, bool GPTQ, bool EXCHANGES = false>
__global__ void __launch_bounds__(32 * CTA_WARPS, 1) product(const __grid_constant__ Chain c) {
    constexpr int SCALE_BYTES = GPTQ ? 128 : 32;
    extern __shared__ __align__(128) byte shared[];
    __shared__ float squares[ROWS][CTA_WARPS];
    __shared__ u32 warps[MOST_TILES];  // whose last segment is in a tile; bit 31: one continues
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    let_the_next_begin();

    int4 places[2];  // of the first piece of x that this thread moves: before memory is busy
    if (c.stages[0].place && (int)threadIdx.x < c.stages[0].k / 8)
        places_of(c.stages[0], threadIdx.x, places);
    byte* ring = shared + warp * c.slots * c.slot_bytes;
    int* all_shares = (int*)(shared + CTA_WARPS * c.slots * c.slot_bytes);
    float* ended = (float*)(all_shares + CTA_WARPS * c.words);
    Barrier* barriers = (Barrier*)(ended + c.tiles * c.rows * TILE_COLUMNS);
    byte* xs = (byte*)(barriers + CTA_WARPS * c.slots);
    float* last = (float*)xs;  // after x has been read
    int* own = all_shares + warp * c.words;
    for (int s = 0; s < c.count; ++s) {
        const Stage& stage = c.stages[s];
        const int part = min(blockIdx.x / stage.ctas, stage.parts - 1);
        const int* from = matrices_of(stage)->shares + (part * CTA_WARPS + warp) * stage.words;
        for (int i = lane; i < stage.words; i += 32)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                             shared_address(own + stage.share_at + i)), "l"(from + i));
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    const u32 ring_at = shared_address(ring), barrier = shared_address(barriers + warp * c.slots);
    if (lane < c.slots) begin_barrier(barrier + 8 * lane);
    end_barriers();

    Work ahead(c.stages[0], own);  // the work to fetch, in all stages
    const int* next_kind = ahead.share->kinds;
    const byte* next = 0;
    int next_stage = 0, next_segment = 0;
    auto open = [&]() {  // the first segment of a stage that has one
        while (ahead.segments <= 0 && ++next_stage < c.count)
            ahead = Work(c.stages[next_stage], own);
        if (next_stage == c.count) return;
        next_segment = 0, next_kind = ahead.share->kinds, next = ahead.words(0);
    };
    open();
    auto fetch_next = [&](int slot) {
        if (next_stage == c.count) return;
        const int kind = *next_kind++;
        next = fetch(Step(kind, SCALE_BYTES), barrier + 8 * slot, ring_at + slot * c.slot_bytes, next);
        if (!(kind >> 7 & 1)) return;
        if (++next_segment < ahead.segments) {
            next = ahead.words(next_segment);
        } else {
            ahead.segments = 0;
            open();
        }
    };
    for (int s = 0; s < c.slots; ++s) fetch_next(s);
    auto prefetch_shared = [&](int s) {  // to L2, what the CTAs of a stage share
        const Stage& stage = c.stages[s];
        const Work work(stage, own);
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
    Exchange exchange(c.peers, 0), gathering(c.peers, 0);  // of sums, and of columns before them
    if constexpr (EXCHANGES) {
        exchange.begin();
        gathering.number = exchange.number;
        if (c.gather.own) gathering.send_columns(c.gather, c.rows);
        if (c.gather.own && c.gather.sums) exchange.next();
    }

    int slot = 0, parity = 0;
#pragma unroll 1
    for (int s = 0; s < c.count; ++s) {
        const Stage& stage = c.stages[s];
        const Work work(stage, own);
        unsigned met = 0;
        if (s) met = arrive(c.meetings, blockIdx.x, gridDim.x);
        if (s && s + 1 < c.count) prefetch_shared(s + 1);
        if (s && stage.place && !stage.after && (int)threadIdx.x < stage.k / 8)
            places_of(stage, threadIdx.x, places);
        if ((int)threadIdx.x < work.tiles) {
            const Parts parts(work, threadIdx.x);
            warps[threadIdx.x] = parts.last | (u32)parts.goes_on << 31;
        }
        if (ADDS<ROWS> && stage.after) load_hidden(stage, xs);
        if (s) await(c.meetings, met);
        // with hidden states all of x is there, else a part
        const int held = (stage.after ? stage.k / PANEL_ROWS : stage.length) * ROWS * 64;
        Unit* units = (Unit*)(xs + held);
        byte* x_at = xs + (stage.after ? work.part * stage.length * ROWS * 64 : 0);
        auto read = [&](int piece, uint4* v) {
            if (EXCHANGES && stage.x == (const half_bits*)c.gather.own)
                gathering.columns<ROWS>(c.gather, c.rows, piece, v);
            else
                read_rows<ROWS>(stage, c.rows, piece, v);
        };
        if (work.tiles)
            stage_x<ROWS>(stage, work.part, c.rows, places, xs, x_at, units, squares, read);
        const int* kinds = work.share->kinds;
        float total[4];
        for (int segment = 0; segment < work.segments; ++segment) {
            const int panel = segment ? 0 : work.share->row / PANEL_ROWS;
            const byte* from = x_at + panel * ROWS * 64;
            const Unit* own_units = units + panel * ROWS;
#pragma unroll
            for (int i = 0; i < 4; ++i) total[i] = 0.0f;
            int kind;
            do {
                kind = *kinds++;
                const int panels = kind >> 4 & 7;
                const byte *codes = ring + slot * c.slot_bytes;
                const byte *scales = codes + (kind & 15) * panels * 128;
                wait_for_bytes(barrier + 8 * slot, parity);
                if constexpr (GPTQ) {
                    multiply<4, ROWS, true>(codes, scales, from, own_units, kind, lane, total);
                } else {
#define CASE(B) multiply<B, ROWS, false>(codes, scales, from, own_units, kind, lane, total)
                    FOR_BITS(kind & 15, CASE)
                }
                from += panels * ROWS * 64, own_units += panels * ROWS;
                __syncwarp();
                fetch_next(slot);
                if (++slot == c.slots) slot = 0, parity ^= 1;
            } while (!(kind >> 7 & 1));
            if (segment + 1 < work.share->segments)
                put<ROWS>(total, c.rows,
                        ended + (work.share->tile + segment) * c.rows * TILE_COLUMNS);
        }
        const Ending ending(stage, work, warp, c.rows);
        __syncthreads();
        if (work.segments == work.share->segments && work.segments > 0)
            put<ROWS>(total, c.rows, last + warp * c.rows * TILE_COLUMNS);
        __syncthreads();
        finish<EXCHANGES>(stage, work, c.rows, last, ended, warps, ending, squares, exchange);
    }
    if constexpr (EXCHANGES) exchange.end();
}

// y = x Q for 5 to 64 rows, one product or several in sequence, with codes as fp16: a warp multiplies
// a part of the rows of whole tiles, CTAs meet, and all of them add up the parts.
// docs/concepts/decoding.md describes who computes what; batched.py makes it.
#include "halves.cuh"
#include "grouped.cuh"
#include "activations.cuh"
#include "ring.cuh"
#include "early.cuh"
#include "peers.cuh"

constexpr int THREADS = 32 * CTA_WARPS;
constexpr int PIECES = 4;  // of x that a thread reads at a time

struct Matrix {
    const byte* words;          // [tile] of `tile_bytes`, see PackedMatrix
    const int* lists;           // [part] of the stage's `words`, see Work
    const half_bits* bias;      // (columns), or null
    const half_bits* residual;  // (rows, columns) to add to the product, or null
    half_bits* y;               // (rows, columns), or null
    float* exact;               // y before it is rounded, or null; of this rank, if there are others
    half_bits* copy;            // y again, columns as `to` says; or null
    float* partial;             // [tile][part] of ROWS · 32, see keep
    int columns, tiles, tile_bytes;
    int parts, each, first_cta, ctas;  // each: tiles of a warp
};

struct Stage {  // a product with matrices that share x
    Matrix of[MOST_TOGETHER];
    const half_bits* x;     // (rows, k), in the order of the matrices' rows unless lists have one
    const half_bits* norm;  // weights (k) in the order of the rows, if x is to be normalized; or null
    const float* squares;   // [row][tile] of x, for the norm; then sums, if it is centered
    float* squared;         // [row][tile] of the result, for a norm behind, and sums; or null
    // If the result is normalized, and that is added to hidden states:
    const half_bits* after;   // weights (columns) of that norm; or null
    const half_bits* hidden;  // (rows, columns); or null: zeros
    half_bits *sum, *next;    // (rows, columns), the same; and again, columns as `to` says, or null
    float* summed;            // [row][tile] of the sum, for a norm behind; or null
    const int* to;          // (columns), for `copy`
    int k, matrices;
    int words, list_at;     // ints of a list; where it lies in shared memory
    int exchanges;          // whether ranks add up their results, see Peers
    int gathers;            // whether lists say where rows are in x
    int centered, totals;   // whether the norm subtracts the mean of x, and the one behind does
    int activation;         // not 0: y of the second = activation(x Q of the first) · (x Q of it)
    float eps, multiplier;  // multiplier: of the result, before it is added
    float after_eps, after_multiplier;  // the same of the normalized result
};

struct Chain {
    Stage stages[MOST_CHAINED];
    unsigned* meetings;               // see meet
    Peers peers;
    Gather gather;
    int count, rows, slots, x_bytes;  // slots: steps that a warp has in flight
};

// A warp's work in a stage: tiles of a matrix, and a part of its rows. The part's list: its first
// panel, its panels, where it begins in a tile; then steps, see Step. If the stage gathers x, the
// place of each row comes before.
struct Work {
    const Matrix* of;  // null: the CTA has none
    int part, tile, tiles;

    __device__ __forceinline__ explicit Work(const Stage& stage)
        : of(nullptr), part(0), tile(0), tiles(0) {
        for (int i = 0; i < stage.matrices; ++i) {
            const Matrix& m = stage.of[i];
            const int cta = (int)blockIdx.x - m.first_cta;
            if (cta < 0 || cta >= m.ctas) continue;
            of = &m, part = cta % m.parts;
            tile = (cta / m.parts * CTA_WARPS + (int)threadIdx.x / 32) * m.each;
            tiles = max(0, min(m.each, m.tiles - tile));
        }
    }
    // The most tiles that a warp has of the ones that multiply together: the first one has.
    __device__ __forceinline__ int turns() const {
        if (!of) return 0;
        const int first = tile - (int)threadIdx.x / 32 % GROUP * of->each;
        return max(0, min(of->each, of->tiles - first));
    }
};
__device__ __forceinline__ const int* steps_of(const Stage& stage, const int* list) {
    return list + LIST_HEADER + (stage.gathers ? list[1] * PANEL_ROWS : 0);
}

// What a warp fetches next: the steps of all its tiles in all stages.
template <int SCALE_BYTES> struct Fetcher {
    const Chain& c;
    const int *lists, *step;
    const byte* next_step;
    Work work;
    int stage, tile;

    __device__ __forceinline__ Fetcher(const Chain& c, const int* lists)
        : c(c), lists(lists), work(c.stages[0]), stage(0), tile(0) {
        open();
    }
    __device__ __forceinline__ void open() {  // the next tile, in a stage that has one
        while (tile == work.tiles) {
            if (++stage == c.count) return;
            work = Work(c.stages[stage]), tile = 0;
        }
        const int* list = lists + c.stages[stage].list_at;
        const Matrix& m = *work.of;
        step = steps_of(c.stages[stage], list);
        next_step = m.words + (integer)(work.tile + tile) * m.tile_bytes + list[2];
    }
    __device__ __forceinline__ void next(u32 barrier, u32 slot) {
        if (stage == c.count) return;
        const int kind = *step++;
        next_step = fetch(Step(kind, SCALE_BYTES), barrier, slot, next_step);
        if (kind >> 7 & 1) ++tile, open();
    }
};

// Return the mean of a row's squares, or of its numbers, from the sums of its tiles.
__device__ __forceinline__ float mean_of(const float* sums, int columns) {
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < columns / TILE_COLUMNS; i += 32) sum += __ldcg(sums + i);
    return sum_of_warp(sum) / columns;
}

// Put the part's x, ROWS rows, into shared memory, as `multiply` reads it.
template <int ROWS>
__device__ __forceinline__ void stage_x(const Stage& stage, const int* list, int rows, byte* xs) {
    __shared__ float sizes[ROWS], means[ROWS];
    const int count = list[1] * ROWS * 4;
    auto row_of = [&](int i) { return i / 4 % ROWS; };
    auto place = [&](int i) { return (list[0] + i / (4 * ROWS)) * PANEL_ROWS + i % 4 * 8; };
    auto read = [&](int i) {
        if (i >= count || row_of(i) >= rows) return uint4{0, 0, 0, 0};
        const half_bits* of_row = stage.x + (integer)row_of(i) * stage.k;
        if (!stage.gathers) return __ldcg((const uint4*)(of_row + place(i)));
        u32 x[8];
        const int* order = list + LIST_HEADER + place(i) - list[0] * PANEL_ROWS;
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = __ldcg(of_row + order[e]);
        return uint4{x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16};
    };
    uint4 v[PIECES];
#pragma unroll 1
    for (int base = threadIdx.x; base - (int)threadIdx.x < count; base += PIECES * THREADS) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) v[i] = read(base + i * THREADS);
        if (stage.norm && base == threadIdx.x) {
            for (int row = threadIdx.x / 32; row < rows; row += CTA_WARPS) {
                const float* sums = stage.squares + row * stage.k / TILE_COLUMNS;
                float mean = 0.0f, square = mean_of(sums, stage.k);
                if (stage.centered) {
                    mean = mean_of(sums + rows * stage.k / TILE_COLUMNS, stage.k);
                    square = fmaxf(square - mean * mean, 0.0f);
                }
                if (threadIdx.x % 32 == 0)
                    sizes[row] = rsqrtf(square + stage.eps), means[row] = mean;
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = base + i * THREADS;
            if (at >= count) break;
            if (stage.norm && row_of(at) < rows)
                v[i] = normed(v[i], sizes[row_of(at)],
                              __ldg((const uint4*)(stage.norm + place(at))), means[row_of(at)]);
            if constexpr (ROWS == GROUPED_ROWS) put_grouped<ROWS>(xs, at, paired(v[i]));
            else ((uint4*)xs)[at] = paired(v[i]);
        }
    }
}

// Keep a tile's sums of a part: [8 rows][row of a lane's two][lane] of 4 columns each.
template <int ROWS>
__device__ __forceinline__ void keep(const Work& work, int tile, int rows,
                                     const float (*total)[2][4]) {
    float4* to = (float4*)work.of->partial +
                 ((integer)tile * work.of->parts + work.part) * (ROWS * 8) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (8 * n < rows)
                __stcg(to + (2 * n + i) * 32, float4{total[n][0][i], total[n][0][2 + i],
                                                     total[n][1][i], total[n][1][2 + i]});
}

// Add up a lane's 4 columns of all parts: unit u of a tile is a row of the two of each lane.
template <int ROWS, int COUNT>
__device__ __forceinline__ void add_some(const float4* from, int parts, float* sums) {
    float4 v[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        v[i] = i < parts ? __ldcg(from + i * (ROWS * 8)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        sums[0] += v[i].x, sums[1] += v[i].y, sums[2] += v[i].z, sums[3] += v[i].w;
}
template <int ROWS>
__device__ __forceinline__ void add_parts(const Matrix& m, int tile, int u, float* sums) {
    const float4* from =
        (const float4*)m.partial + (integer)tile * m.parts * (ROWS * 8) + u * 32 + threadIdx.x % 32;
    int left = m.parts;
    for (; left > 8; left -= 16, from += 16 * (ROWS * 8)) add_some<ROWS, 16>(from, left, sums);
    if (left > 4) add_some<ROWS, 8>(from, left, sums);
    else if (left > 0) add_some<ROWS, 4>(from, left, sums);
}

// Send other ranks the sums that a thread of `finish` is going to add to theirs.
template <int ROWS>
__device__ __forceinline__ void send_sums(const Stage& stage, int rows, const Exchange& exchange) {
    constexpr int UNITS = ROWS / 4;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Matrix& m = stage.of[0];
    for (int unit = threadIdx.x / 32 * gridDim.x + blockIdx.x; unit < m.tiles * UNITS;
         unit += gridDim.x * CTA_WARPS) {
        const int tile = unit / UNITS, u = unit % UNITS, row = u / 2 * 8 + u % 2, own = row + 2 * t;
        if (row >= rows) continue;
        float sums[4] = {};
        add_parts<ROWS>(m, tile, u, sums);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = tile * TILE_COLUMNS + 8 * c + g;
            if (own >= rows || column >= m.columns) continue;
            if (m.bias) sums[c] += from_half(m.bias[column]);
            const integer at = (integer)own * m.columns + column;
            m.exact[at] = sums[c];
            exchange.send(at, sums[c]);
        }
    }
}

// Write what all CTAs have computed: a warp has 4 rows and 32 columns at a time. ADDS: up the sums
// of all ranks.
template <int ROWS, bool ADDS>
__device__ __forceinline__ void finish(const Stage& stage, int rows, const Exchange& exchange) {
    constexpr int UNITS = ROWS / 4;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int which = stage.activation != 0, first = 0;  // of a matrix, and its first unit
    for (int all = threadIdx.x / 32 * gridDim.x + blockIdx.x;; all += gridDim.x * CTA_WARPS) {
        while (which < stage.matrices && all - first >= stage.of[which].tiles * UNITS)
            first += stage.of[which++].tiles * UNITS;
        if (which == stage.matrices) return;
        const bool is_gated = stage.activation && which == 1;
        const Matrix &m = stage.of[which], &gating = stage.of[0];
        const int tile = (all - first) / UNITS, u = (all - first) % UNITS, row = u / 2 * 8 + u % 2;
        if (row >= rows) continue;
        const int own_row = row + 2 * t;
        const integer at = (integer)own_row * m.columns;
        half_bits added[4];
        int to[4];
        bool is_there[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = tile * TILE_COLUMNS + 8 * c + g;
            is_there[c] = own_row < rows && column < m.columns;
            if (m.residual) added[c] = is_there[c] ? __ldcg(m.residual + at + column) : 0;
            if (m.copy) to[c] = is_there[c] ? __ldg(stage.to + column) : 0;
        }
        float sums[4] = {}, gates[4] = {}, square = 0.0f, total = 0.0f;
        if (is_gated) add_parts<ROWS>(gating, tile, u, gates);
        if constexpr (ADDS) {
            int places[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                places[c] = (int)at + tile * TILE_COLUMNS + 8 * c + g;
                if (is_there[c]) sums[c] = m.exact[places[c]];
            }
            exchange.add<4>(places, is_there, sums);
        } else {
            add_parts<ROWS>(m, tile, u, sums);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (!is_there[c]) continue;
            const int column = tile * TILE_COLUMNS + 8 * c + g;
            float value = sums[c];
            if (m.bias && !ADDS) value += from_half(m.bias[column]);
            value *= stage.multiplier;
            if (m.exact && !ADDS) m.exact[at + column] = value;
            half_bits y = to_half(value);
            if (is_gated) {
                float gate = gates[c];
                if (gating.bias) gate += from_half(gating.bias[column]);
                y = to_half(activated(stage.activation, from_half(to_half(gate))) * from_half(y));
            }
            if (ADDS) y = exchange.added(sums[c], stage.multiplier, m.residual, added[c]);
            else if (m.residual) y = to_half(from_half(added[c]) + from_half(y));
            if (m.y) m.y[at + column] = y;
            if (m.copy) m.copy[at + to[c]] = y;
            square += from_half(y) * from_half(y), total += from_half(y);
        }
        if (!stage.squared) continue;
        float* squared = stage.squared + own_row * m.tiles + tile;
        for (int o = 4; o < 32; o *= 2) square += __shfl_xor_sync(~0u, square, o);
        if (g == 0 && own_row < rows) *squared = square;
        if (!stage.totals) continue;
        for (int o = 4; o < 32; o *= 2) total += __shfl_xor_sync(~0u, total, o);
        if (g == 0 && own_row < rows) squared[rows * m.tiles] = total;
    }
}

// Add RN16(RN16(y · size) · weight) · multiplier to hidden states: a warp has 256 columns of a row.
__device__ __forceinline__ void add_normed(const Stage& stage, int rows) {
    const Matrix& m = stage.of[0];
    const int lane = threadIdx.x % 32, each = (m.columns + 255) / 256;
    for (int unit = threadIdx.x / 32 * gridDim.x + blockIdx.x; unit < rows * each;
         unit += gridDim.x * CTA_WARPS) {
        const int row = unit / each, column = unit % each * 256 + lane * 8;
        const bool is_there = column < m.columns;
        const integer at = (integer)row * m.columns + column;
        uint4 y = {}, weights = {}, hidden = {};
        if (is_there) y = __ldcg((const uint4*)(m.y + at));
        if (is_there) weights = __ldg((const uint4*)(stage.after + column));
        if (is_there && stage.hidden) hidden = __ldcg((const uint4*)(stage.hidden + at));
        const float square_mean = mean_of(stage.squared + row * m.tiles, m.columns);
        const float size = rsqrtf(square_mean + stage.after_eps);
        float old[8], added[8], square = 0.0f;
        pairs_of(hidden, old), pairs_of(normed(y, size, weights), added);
        u32 sum[4];
#pragma unroll
        for (int e = 0; e < 8; ++e) old[e] += added[e] * stage.after_multiplier;
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = halves(old[2 * e], old[2 * e + 1]);
        const uint4 all = {sum[0], sum[1], sum[2], sum[3]};
        pairs_of(all, old);
#pragma unroll
        for (int e = 0; e < 8; ++e) square += old[e] * old[e];
        for (int o = 1; o < 4; o *= 2) square += __shfl_xor_sync(~0u, square, o);
        if (!is_there) continue;
        *(uint4*)(stage.sum + at) = all;
        if (stage.summed && lane % 4 == 0)
            stage.summed[row * m.tiles + column / TILE_COLUMNS] = square;
        for (int e = 0; stage.next && e < 8; ++e)
            stage.next[at - column + __ldg(stage.to + column + e)] =
                (half_bits)(sum[e / 2] >> (16 * (e % 2)));
    }
}

// ROWS: 8, 16, 32 or 64, the most rows of x. EXCHANGES: whether ranks gather x or add up a result.
template <int ROWS, bool GPTQ, bool EXCHANGES = false>
__global__ void __launch_bounds__(THREADS, 1) batched(const __grid_constant__ Chain c) {
    constexpr bool IS_GROUPED = ROWS == GROUPED_ROWS;
    constexpr int SCALE_BYTES = GPTQ ? 128 : 32, SLOT = STEP + BLOCK_PANELS * SCALE_BYTES;
    extern __shared__ __align__(128) byte shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    let_the_next_begin();
    byte* xs = shared;
    byte* ring = shared + c.x_bytes + warp * c.slots * SLOT;
    Barrier* barriers = (Barrier*)(shared + c.x_bytes + CTA_WARPS * c.slots * SLOT);
    int* lists = (int*)(barriers + CTA_WARPS * c.slots);
    for (int s = 0; s < c.count; ++s) {
        const Stage& stage = c.stages[s];
        const Work work(stage);
        const int line = (threadIdx.x * gridDim.x + blockIdx.x) * 32;  // of 128 bytes, for all CTAs
        if (stage.norm && 2 * line < stage.k)
            prefetch(stage.norm + 2 * line);
        if (stage.to && line < stage.of[stage.activation != 0].columns)
            prefetch(stage.to + line);
        for (int i = threadIdx.x; work.of && i < stage.words; i += THREADS)
            lists[stage.list_at + i] = __ldg(work.of->lists + work.part * stage.words + i);
    }
    const u32 ring_at = shared_address(ring), barrier = shared_address(barriers + warp * c.slots);
    if (lane < c.slots) begin_barrier(barrier + 8 * lane);
    end_barriers();
    __syncthreads();
    Fetcher<SCALE_BYTES> fetcher(c, lists);
    for (int s = 0; s < c.slots; ++s) fetcher.next(barrier + 8 * s, ring_at + s * SLOT);
    wait_for_input();
    __shared__ unsigned number;  // of the exchange: registers are few
    if constexpr (EXCHANGES) {
        Exchange exchange(c.peers);
        if (c.gather.all) {
            exchange.gather(c.gather, c.rows);
            meet(c.meetings, blockIdx.x, gridDim.x);
            if (c.gather.sums) exchange.next();
        }
        if (threadIdx.x == 0) number = exchange.number;
        __syncthreads();
    }

    int slot = 0, parity = 0;
    unsigned met = 0;
#pragma unroll 1
    for (int s = 0; s < c.count; ++s) {
        const Stage& stage = c.stages[s];
        const Work work(stage);
        const int* list = lists + stage.list_at;
        if (s) await(c.meetings, met);
        if (work.of) stage_x<ROWS>(stage, list, c.rows, xs);
        if constexpr (IS_GROUPED) end_grouped();
        __syncthreads();
        const int turns = IS_GROUPED ? work.turns() : work.tiles;
#pragma unroll 1
        for (int tile = 0; tile < turns; ++tile) {
            const bool is_there = !IS_GROUPED || tile < work.tiles;
            const int* step = steps_of(stage, list);
            const byte* x = xs;
            float total[ROWS / 8][2][4] = {};
            int kind;
            do {
                kind = *step++;
                const byte* codes = ring + slot * SLOT;
                const byte* scales = codes + (kind & 15) * (kind >> 4 & 7) * 128;
                if (is_there) wait_for_bytes(barrier + 8 * slot, parity);
#define CASE(B)                                                                                     \
    if constexpr (IS_GROUPED)                                                                       \
        multiply_grouped<B, ROWS, GPTQ>(codes, scales, shared_address(x), kind, lane, is_there,     \
                                        total);                                                     \
    else multiply<B, ROWS, GPTQ>(codes, scales, x, kind, lane, total)
                if constexpr (GPTQ) {
                    CASE(4);
                } else {
                    FOR_BITS(kind & 15, CASE)
                }
                x += (kind >> 4 & 7) * ROWS * 64;
                __syncwarp();
                if (is_there) fetcher.next(barrier + 8 * slot, ring_at + slot * SLOT);
                slot += is_there;  // with a branch, NVRTC 13.0 and 13.1 crash now and then
                if (slot == c.slots) slot = 0, parity ^= 1;
            } while (!(kind >> 7 & 1));
            if (is_there) keep<ROWS>(work, work.tile + tile, c.rows, total);
        }
        meet(c.meetings, blockIdx.x, gridDim.x);
        if (EXCHANGES && stage.exchanges) {
            const Exchange exchange(c.peers, number);
            send_sums<ROWS>(stage, c.rows, exchange);
            finish<ROWS, true>(stage, c.rows, exchange);
        } else {
            finish<ROWS, false>(stage, c.rows, Exchange(c.peers, 0));
        }
        if (stage.after) {
            meet(c.meetings, blockIdx.x, gridDim.x);
            add_normed(stage, c.rows);
        }
        if (s + 1 < c.count) met = arrive(c.meetings, blockIdx.x, gridDim.x);
    }
    if constexpr (EXCHANGES) Exchange(c.peers, number).end();
}

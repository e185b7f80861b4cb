// The experts of many rows: tokens sorted by expert, in tiles of MANY_ROWS that multiply packed
// matrices directly. Launches: gather, many_up, gather, many_down, combine.
#include "halves.cuh"
#include "activations.cuh"
#include "ring.cuh"
#include "early.cuh"
#include "experts.cuh"

constexpr int WARPS = MANY_WARPS, THREADS = 32 * WARPS, ROWS = MANY_ROWS, CHUNK = MANY_CHUNK;
constexpr int SLOT = STEP + BLOCK_PANELS * 32;
constexpr int PANEL_BYTES = ROWS * 64, CHUNK_BYTES = CHUNK * PANEL_BYTES;

struct Sorted {
    const Expert* of;          // as in Experts
    const integer* offsets;    // (experts + 1), of an expert's first token in `assigned`; those before
                               // all of them belong to experts that are elsewhere
    const integer* before;     // (experts + 1), of its first tile of rows
    const integer* assigned;   // (rows · slots), row · slots + slot, by expert
    int* places;               // (rows · slots), where a slot of a row is in `assigned`, or -1: elsewhere
    const half_bits* x;        // (rows, hidden), normalized
    const float* weights;      // (rows, slots)
    const half_bits* hidden;   // (rows, hidden)
    half_bits *staged, *inner; // what a launch reads, (rows · slots, k) as `paired`; gate and up's result
    half_bits* y;              // (rows · slots, hidden), weighted
    half_bits* sum;            // (rows, hidden)
    float* part;               // (rows, hidden), the result if not all experts are here; or null
    int experts, rows, slots, top, size, most_inner, activation, scales_input;
    float multiplier;
};

// The expert of a token, or of a tile of rows.
__device__ __forceinline__ int expert_of(const integer* begins, int experts, int index) {
    int low = 0, high = experts;  // begins[low] <= index < begins[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (__ldg(begins + middle) <= index) low = middle;
        else high = middle;
    }
    return low;
}

// Bring what a token's expert reads into the order of its rows: x for up, or `inner` for down.
// A CTA has a token.
template <bool DOWN> __device__ __forceinline__ void gather(const Sorted& s) {
    extern __shared__ __align__(16) half_bits row[];
    overlap_launches();
    const int token = blockIdx.x, assigned = (int)s.assigned[token];
    if (token < s.offsets[0]) {
        if (!DOWN && threadIdx.x == 0) s.places[assigned] = -1;
        return;
    }
    const Expert& of = s.of[expert_of(s.offsets, s.experts, token)];
    const int width = DOWN ? of.inner : s.size, stride = DOWN ? s.most_inner : s.size;
    const half_bits* from = DOWN ? s.inner + (integer)token * stride
                                 : s.x + (integer)(assigned / s.slots) * stride;
    const uint4* places = (const uint4*)(DOWN ? of.to : of.place);
    const bool is_scaled = !DOWN && s.scales_input && assigned % s.slots < s.top;
    u32 weight = 0;
    if (is_scaled) weight = to_half(s.weights[assigned]);
    if (!DOWN && threadIdx.x == 0) s.places[assigned] = token;
    for (int c = threadIdx.x; c < width / 8; c += blockDim.x) {
        const uint4 v = __ldcg((const uint4*)from + c), to = __ldg(places + c);
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
        const u32 at[4] = {to.x, to.y, to.z, to.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (is_scaled) pairs[i] = times(pairs[i], twice(weight));
            row[at[i] & 0xffff] = (half_bits)pairs[i];
            row[at[i] >> 16] = (half_bits)(pairs[i] >> 16);
        }
    }
    __syncthreads();
    uint4* to = (uint4*)(s.staged + (integer)token * stride);
    for (int c = threadIdx.x; c < width / 8; c += blockDim.x) to[c] = ((const uint4*)row)[c];
}

// Add a panel times ROWS rows of x to `total`, see `multiply`.
template <int B>
__device__ __forceinline__ void multiply_panel(const byte* codes, const byte* scales, const byte* x,
                                               int lane, float (*total)[2][4]) {
    u32 w[B], a[2][2][4];
    read_words<B>(codes, lane, w);
    values<B, false>(w, half_scales_of<false>(scales, lane / 4), a);
    x += lane * 16;
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        const uint4 b = *(const uint4*)(x + n * 512);
        mma(total[n][0], a[0][0], b.x, b.y), mma(total[n][1], a[1][0], b.x, b.y);
        mma(total[n][0], a[0][1], b.z, b.w), mma(total[n][1], a[1][1], b.z, b.w);
    }
}

// A tile of rows times 32 columns of each warp.
template <bool DOWN> __device__ __forceinline__ void run(const Sorted& s) {
    extern __shared__ __align__(128) byte shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    byte* ring = shared + 2 * CHUNK_BYTES + warp * MANY_SLOTS * SLOT;
    Barrier* barriers = (Barrier*)(shared + 2 * CHUNK_BYTES + WARPS * MANY_SLOTS * SLOT);
    let_the_next_begin();
    const u32 barrier = shared_address(barriers + warp * MANY_SLOTS);
    if (lane < MANY_SLOTS) begin_barrier(barrier + 8 * lane);
    end_barriers();
    wait_for_input();
    if (blockIdx.y >= s.before[s.experts]) return;
    const int expert = expert_of(s.before, s.experts, blockIdx.y);
    const Expert& of = s.of[expert];
    const int first = (int)s.offsets[expert] + ((int)blockIdx.y - (int)s.before[expert]) * ROWS;
    const int rows = min(ROWS, (int)s.offsets[expert + 1] - first);
    const int half = DOWN ? 0 : warp % 2, width = DOWN ? s.size : of.inner;
    const int tile = DOWN ? blockIdx.x * WARPS + warp : blockIdx.x * (WARPS / 2) + warp / 2;
    const int begin_tile = blockIdx.x * (DOWN ? WARPS : WARPS / 2);
    if (begin_tile * TILE_COLUMNS >= width) return;
    const bool has_tile = tile * TILE_COLUMNS < width;
    const Side& side = DOWN ? of.down : of.up;
    const int panels = (DOWN ? of.inner : s.size) / PANEL_ROWS, stride = DOWN ? s.most_inner : s.size;
    const byte* x = (const byte*)(s.staged + (integer)first * stride);

    const u32 xs = shared_address(shared);
    auto load = [&](int chunk) {  // a chunk of x, each piece 16 bytes
        const int count = min(CHUNK, panels - chunk * CHUNK) * 4;
        for (int i = threadIdx.x; i < CHUNK * 4 * ROWS; i += THREADS) {
            const int row = i / (CHUNK * 4), c = i % (CHUNK * 4);
            if (row >= rows || c >= count) continue;
            const byte* from = x + (integer)row * stride * 2 + (chunk * CHUNK * 4 + c) * 16;
            const u32 to = xs + chunk % 2 * CHUNK_BYTES + c / 4 * PANEL_BYTES + row * 64 + c % 4 * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    const int list = DOWN ? 0 : half, lists = DOWN ? side.parts : 1;
    const int4* step = side.steps + side.begins[list];
    const int4* end = side.steps + side.begins[list + lists];
    const int4* ahead = step;
    const byte* words = side.words[half] + (integer)tile * side.tile_bytes[half];
    const u32 ring_at = shared_address(ring);
    auto fetch_next = [&](int slot) {
        if (!has_tile || ahead == end) return;
        const int4 one = __ldg(ahead++);
        fetch(Step(one.x, 32), barrier + 8 * slot, ring_at + slot * SLOT, words + one.y);
    };
    load(0);
    for (int i = 0; i < MANY_SLOTS; ++i) fetch_next(i);
    float total[ROWS / 8][2][4] = {};
    int slot = 0, parity = 0, left = 0, kind = 0, place = 0;
    const byte *codes = nullptr, *scales = nullptr;
#pragma unroll 1
    for (int p = 0; p < panels; ++p) {
        if (p % CHUNK == 0) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            if (p + CHUNK < panels) load(p / CHUNK + 1);
        }
        if (!has_tile) continue;
        if (!left) {
            kind = __ldg(&step->x), ++step;
            left = kind >> 4 & 7, place = kind >> 8;
            codes = ring + slot * SLOT, scales = codes + (kind & 15) * left * 128;
            wait_for_bytes(barrier + 8 * slot, parity);
        }
        const byte* own = shared + p / CHUNK % 2 * CHUNK_BYTES + p % CHUNK * PANEL_BYTES;
#define CASE(B) multiply_panel<B>(codes, scales + (place & 3) * 32, own, lane, total)
        FOR_BITS(kind & 15, CASE)
        codes += (kind & 15) * 128, place >>= 2;
        if (--left) continue;
        __syncwarp();
        fetch_next(slot);
        if (++slot == MANY_SLOTS) slot = 0, parity ^= 1;
    }
    const int g = lane / 4, t = lane % 4;
    const half_bits* bias = DOWN ? of.bias[2] : of.bias[half];
    __syncthreads();
    half_bits* gates = (half_bits*)shared + warp / 2 * ROWS * TILE_COLUMNS;  // [column][row]
    auto each = [&](auto then) {
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = 8 * n + 2 * t + i % 2, own = 16 * m + 8 * (i / 2) + g;
                    const int column = tile * TILE_COLUMNS + own;
                    if (row >= rows || column >= width) continue;
                    float value = total[n][m][i];
                    if (bias) value += from_half(bias[column]);
                    then(row, own, column, value);
                }
    };
    if constexpr (DOWN) {
        each([&](int row, int, int column, float value) {
            const int assigned = (int)__ldg(s.assigned + first + row), slot = assigned % s.slots;
            if (!s.scales_input || slot == s.top)
                value *= __ldg(s.weights + assigned);
            s.y[(integer)(first + row) * s.size + column] = to_half(value);
        });
    } else {
        if (half == 0)
            each([&](int row, int own, int, float value) { gates[own * ROWS + row] = to_half(value); });
        __syncthreads();
        if (half == 1)
            each([&](int row, int own, int column, float value) {
                const float gate = from_half(gates[own * ROWS + row]), up = from_half(to_half(value));
                const float y =
                    s.activation ? activated(s.activation, gate) * up : clamped_swiglu(gate, up);
                s.inner[(integer)(first + row) * s.most_inner + column] = to_half(y);
            });
    }
}

// Add up what the experts of a row return, in order; a thread has 8 columns.
__device__ __forceinline__ void combine_rows(const Sorted& s) {
    overlap_launches();
    const int pieces = s.size / 8;
    const integer index = grid_thread();
    if (index >= (integer)s.rows * pieces) return;
    const integer row = index / pieces, c = index % pieces;
    float sum[8] = {}, x[8];
#pragma unroll 4
    for (int slot = 0; slot < s.slots; ++slot) {
        const integer place = __ldg(s.places + row * s.slots + slot);
        if (place < 0) continue;
        pairs_of(__ldcg((const uint4*)s.y + place * pieces + c), x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += x[i];
    }
    if (s.part) {
        float4* to = (float4*)s.part + 2 * index;
        to[0] = {sum[0], sum[1], sum[2], sum[3]}, to[1] = {sum[4], sum[5], sum[6], sum[7]};
        return;
    }
    pairs_of(__ldcg((const uint4*)s.hidden + index), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = x[i] + from_half(to_half(sum[i] * s.multiplier));
    ((uint4*)s.sum)[index] = {halves(sum[0], sum[1]), halves(sum[2], sum[3]), halves(sum[4], sum[5]),
                              halves(sum[6], sum[7])};
}

#define LAUNCH(NAME, BOUNDS, BODY)                                               \
    extern "C" __global__ void BOUNDS NAME(const __grid_constant__ Sorted s) { \
        BODY(s);                                                                 \
    }
LAUNCH(gather_up, __launch_bounds__(GATHER_THREADS), gather<false>)
LAUNCH(gather_down, __launch_bounds__(GATHER_THREADS), gather<true>)
LAUNCH(many_up, __launch_bounds__(THREADS, 2), run<false>)
LAUNCH(many_down, __launch_bounds__(THREADS, 2), run<true>)
LAUNCH(combine, __launch_bounds__(GATHER_THREADS), combine_rows)

// Attention of up to 8 new tokens per sequence to a paged cache, which is read as it is stored; more
// take several launches, each of which sees what those before it stored.
// Each CTA handles a part of a sequence's positions, one key head and 8 or 16 columns, pairs of a
// new token and one of its query heads (attention_wide.cuh); or, of one new token and codes, one to
// four key heads of few query heads (attention_narrow.cuh). Its warps take 16 or 32 positions at a
// time; of two key heads of several query heads, two warps take the same positions, a head each. The
// first operand of the tensor cores has positions as rows, later elements of values; the second one
// has the columns. Rotated elements are never rotated back: the queries, and the sum of the values,
// are rotated once. The new keys are rotated by position, then encoded with the values; their bytes
// are read like those in the cache, to which one CTA writes them.
#include "packed.cuh"
#include "cache_tiles.cuh"
#include "early.cuh"
#include "attention_parts.cuh"
#include "attention_wide.cuh"
#include "attention_narrow.cuh"

template <bool IS_FIRST, class First, class Second> struct Choice { using Type = First; };
template <class First, class Second> struct Choice<false, First, Second> { using Type = Second; };

// Warps that take the same positions, each for a key head of its own.
template <int COLUMNS, int HEADS> __host__ __device__ constexpr int members() {
    return HEADS == 2 && COLUMNS > HEADS ? 2 : 1;
}
// A barrier of two warps.
__device__ __forceinline__ void meet_pair(int pair) {
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

// Reads WIDTH elements of a slot per key head; the head's own begin at `offset`. TOKENS: most new
// ones; HEADS: key heads of a CTA, if more than one then of WIDTH elements each.
template <int WIDTH, int KE, int VE, int TOKENS, int COLUMNS, int HEADS>
__global__ void __launch_bounds__(
    32 * ATTENTION_WARPS * members<COLUMNS, HEADS>(),
    TOKENS == 1 && WIDTH < 256 && (HEADS == 1 || COLUMNS == 2) ? 2 : 1)
    attend(const __grid_constant__ Call call) {
    using Keys = Tiles<HEADS * WIDTH, KE, (HEADS > 1)>;
    using Values = Tiles<HEADS * WIDTH, VE, (HEADS > 1)>;
    constexpr int MEMBERS = members<COLUMNS, HEADS>(), OWN = COLUMNS / MEMBERS;
    constexpr int POSITIONS =
        MEMBERS == 1 && 32 * (Keys::BYTES + Values::BYTES) <= ATTENTION_STEP ? 32 : 16;
    constexpr int VALUES_AT = POSITIONS * Keys::ROW, STAGE = VALUES_AT + POSITIONS * Values::ROW;
    constexpr int PART = part_floats<WIDTH, COLUMNS>();
    using Work = typename Choice<(COLUMNS < 8 * HEADS),
                                 Narrow<WIDTH, KE, VE, POSITIONS, OWN, HEADS / MEMBERS, HEADS>,
                                 Wide<WIDTH, KE, VE, POSITIONS, TOKENS, COLUMNS>>::Type;
    extern __shared__ __align__(16) byte ring[];  // at the end, each warp's sums
    // queries, then each token's new key and value; at the end, sums
    __shared__ float window[COLUMNS + 2 * TOKENS * HEADS][WIDTH];
    __shared__ __align__(16) u32 queries[COLUMNS][WIDTH / 2 + 4];  // pairs as a lane holds them
    __shared__ __align__(16) byte fresh[TOKENS * (Keys::ROW + Values::ROW)];  // new rows
    __shared__ float maxima[ATTENTION_WARPS][COLUMNS], totals[ATTENTION_WARPS][COLUMNS];
    __shared__ int before;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int teams = blockDim.x / 32 / MEMBERS, member = warp % MEMBERS, own_team = warp / MEMBERS;
    const int warps = blockDim.x / 32, dim = call.head_dim;
    const int split = blockIdx.x, team = blockIdx.y / call.parts, part = blockIdx.y % call.parts;
    const int row = blockIdx.z, group = call.heads / call.kv_heads * HEADS, kv = team * HEADS;
    const int tokens = TOKENS == 1 ? 1 : call.tokens;
    const Columns<TOKENS> columns = {part * COLUMNS,
                                     min(COLUMNS, group * tokens - part * COLUMNS), group,
                                     call.heads - group};
    const int width = call.kv_heads * dim, offset = kv * dim % 64;
    const int first_element = kv * dim - offset;
    const u32 padded = (width + 63) / 64 * 64;
    const Keys keys(call.keys, padded, first_element, offset, offset + HEADS * dim, lane);
    const Values values(call.values, padded, first_element, offset, offset + HEADS * dim, lane);
    if (split == 0) prefetch_places(call, team * group * dim, group * dim);
    overlap_launches();
    const int length = call.lengths[row] + (TOKENS == 1 ? 0 : call.after);
    const int* table = call.tables + (integer)row * call.pages;
    if (TOKENS == 1 && lane * 32 < call.pages) touch(table + lane * 32);
    const integer first_row = (integer)row * (TOKENS == 1 ? 1 : call.apart);
    const integer own_q = (first_row * call.heads + team * group) * dim;
    // Queries, then new keys and values in turn: every row by one warp. Those of one token are
    // loaded before it is known which CTA needs the new ones.
    constexpr int ROWS = COLUMNS + 2 * HEADS, THREADS = 32 * ATTENTION_WARPS * MEMBERS;
    constexpr int LOADS = WIDTH / 32, MOST_WARPS = THREADS / 32;
    constexpr int TAKEN = TOKENS > 1 ? 8 / LOADS : (ROWS + MOST_WARPS - 1) / MOST_WARPS;
    constexpr int AHEAD = TAKEN * LOADS;  // loads of a lane, of TAKEN rows
    const int rank = member * teams + own_team;
    Source sources[AHEAD];
    Loaded loaded[AHEAD];
    auto begin_rows = [&](int first, int rows) {
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            const int column = first + i * warps, in_new = max(0, column - columns.count);
            const bool is_query = column < columns.count, turns = is_query || in_new % 2 == 0;
            const int token = is_query ? columns.token(column) : in_new / (2 * HEADS);
            const integer at_new = (first_row + token) * width + first_element;
            const half_bits* const x =
                is_query ? call.q + own_q + columns.head(column) * dim - offset
                         : (turns ? call.k : call.v) + at_new + in_new / 2 % HEADS * WIDTH;
            const int there = is_query ? offset + dim : column < rows ? width - first_element : 0;
#pragma unroll
            for (int j = i * LOADS; j < (i + 1) * LOADS; ++j) {
                const int at = j % LOADS * 32 + lane;
                int e = at - offset;
                if (!is_query && (e < 0 || e >= dim)) e = (first_element + at) % dim;  // of another
                if (at >= there || e < 0) sources[j] = {call.q, 0, 0, NO_ELEMENT};
                else if (turns) sources[j] = call.source(x + at - e, e, row, token);
                else sources[j] = {x + at, 0, 0, NOT_ROTATED};
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) loaded[j] = call.loaded(sources[j]);
    };
    const int all_rows = columns.count + 2 * tokens * HEADS;
    if constexpr (TOKENS == 1) begin_rows(rank, all_rows);
    const int steps = (length + tokens + POSITIONS - 1) / POSITIONS;
    const int first = max(0, length + columns.token(0) + 1 - call.window) / POSITIONS;
    const int each = (steps - first + call.splits - 1) / call.splits;
    const int begin = first + split * each, end = min(steps, begin + each);
    byte* const own = ring + own_team * call.stages * STAGE;
    int pages = 0;  // for step `lane` of 32
    auto fetch = [&](u32 i, const byte* to, bool is_first) {
        const int step = begin + own_team + i * teams;
        if (step < end && i % 32 == 0) {
            const u32 of_lane = step + lane * teams;
            pages = of_lane < end ? table[of_lane / (PAGE_TOKENS / POSITIONS)] : 0;
        }
        if (step < end && (!is_first || member == MEMBERS - 1)) {
            const u32 page = __shfl_sync(~0u, pages, i % 32);
            const u32 slot = page * PAGE_TOKENS + (u32)step * POSITIONS % PAGE_TOKENS;
            const int left = length - step * POSITIONS;
            if (is_first || member == 0)
                keys.template begin<POSITIONS>(shared_address(to), slot, left, lane);
            if (is_first || member == MEMBERS - 1)
                values.template begin<POSITIONS>(shared_address(to) + VALUES_AT, slot, left, lane);
        }
        end_step();
    };
    // Two warps that share steps: the second one asks for the first half of the ring, while the
    // first one prepares queries.
    const int asked = MEMBERS > 1 ? (call.stages + 1) / 2 : call.stages;
#pragma unroll 1
    for (int i = 0; i < asked; ++i) fetch(i, own + i * STAGE, true);

    const bool is_last = begin < end && end == steps;  // stores the new keys and values
    const bool has_new = begin < end && end * POSITIONS > length;
    const integer slot = call.slots[first_row + (TOKENS == 1 ? 0 : min(lane, tokens - 1))];
    const int rows = TOKENS == 1 || has_new ? all_rows : columns.count;
#pragma unroll 1
    for (int i = rank; i < rows; i += TAKEN * warps) {
        if (TOKENS > 1 || i != rank) begin_rows(i, rows);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            if (i + j / LOADS * warps < rows)
                window[i + j / LOADS * warps][j % LOADS * 32 + lane] =
                    loaded[j].rotated(sources[j].kind);
    }
    __syncwarp();

    const float scale = call.scale * LOG2_E;
#pragma unroll 1
    for (int column = rank; column < columns.count; column += warps) {
        float* const turned = window[column];
        if constexpr (is_rotated<KE>())
#pragma unroll
            for (int unit = 0; unit < WIDTH; unit += 64) {
                float* two = turned + unit + 2 * lane;
                float of_lane[2] = {two[0], two[1]};
                rotate_unit(of_lane, lane);
                two[0] = of_lane[0], two[1] = of_lane[1];
            }
        __syncwarp();
        const float factor = scale / (is_rotated<KE>() ? 32.0f : 1.0f);  // H₃₂ twice is 32
        Work::prepare(queries[column], turned, factor, lane);
    }
    // Encode the new rows, a unit at a time.
    const int from_row = has_new ? (columns.count - rank + warps - 1) / warps * warps + rank : rows;
#pragma unroll 1
    for (int own_row = from_row; own_row < rows; own_row += warps) {
#pragma unroll 1
        for (int unit = 0; unit < WIDTH; unit += 64) {
            const int in_new = own_row - columns.count, token = in_new / (2 * HEADS);
            const int in_head = unit + 2 * lane;
            const int at = in_new / 2 % HEADS * WIDTH + in_head;
            const bool is_value = in_new % 2;
            const int element = is_value ? VE : KE;
            byte* const to =
                fresh + (is_value ? TOKENS * Keys::ROW + token * Values::ROW : token * Keys::ROW);
            half_bits* const scales = (half_bits*)(to + (is_value ? Values::BYTES : Keys::BYTES));
            const float* from = window[own_row] + in_head;
            const half_bits two[2] = {to_half(from[0]), to_half(from[1])};
            const Code code = encode(element, two, lane);
            put(Rows{to, scales}, element, at, code);
            const integer of_token = TOKENS == 1 ? slot : __shfl_sync(~0u, slot, token);
            // A unit is stored by the head in which it begins.
            if (part == 0 && is_last && unit >= offset && unit < offset + dim)
                put(is_value ? call.values : call.keys, element,
                    of_token * padded + first_element + at, code);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = asked; i < call.stages; ++i) fetch(i, own + i * STAGE, false);
    Columns<TOKENS> of_warp = columns;
    if (MEMBERS > 1) of_warp.count = OWN;
    Work work(queries + member * OWN, of_warp, length, lane, member);
    const Cap cap(call.softcap);
    const byte* stage = own;
    int ahead = call.stages;
#pragma unroll 1
    for (int step = begin + own_team; step < end; step += teams) {
        wait_for_step(call.stages - 1);
        if (MEMBERS > 1) meet_pair(own_team);
        if ((step + 1) * POSITIONS > length) {
            const int place = length - step * POSITIONS;
            if (member == 0)
                keys.template insert<POSITIONS>((byte*)stage, fresh, place, tokens, lane);
            if (member == MEMBERS - 1)
                values.template insert<POSITIONS>((byte*)stage + VALUES_AT,
                                               fresh + TOKENS * Keys::ROW, place, tokens, lane);
            if (MEMBERS > 1) meet_pair(own_team);
            else __syncwarp();
        }
        work.add(stage, step * POSITIONS, call, cap);
        if (MEMBERS > 1) meet_pair(own_team);
        else __syncwarp();
        fetch(ahead++, stage, false);
        stage = stage + STAGE == own + call.stages * STAGE ? own : stage + STAGE;
    }

    work.leave(maxima[own_team] + member * OWN, totals[own_team] + member * OWN);
    __syncthreads();
    work.store((float*)own + member * OWN * (WIDTH + 1), maxima[0] + member * OWN, COLUMNS, teams,
               of_warp.count);
    __syncthreads();
    const integer place = (integer)row * gridDim.y + blockIdx.y;
    float* const parts = call.partial + place * call.splits * PART;
    float* const of_split = parts + split * PART;
#pragma unroll 1
    for (int i = threadIdx.x; i < columns.count * WIDTH; i += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < teams; ++w)
            sum += ((const float*)(ring + w * call.stages * STAGE))[i + i / WIDTH];
        __stcg(of_split + i, sum);
    }
    if (threadIdx.x < columns.count) {
        float m = NOTHING, l = 0.0f;
        for (int w = 0; w < teams; ++w) m = fmaxf(m, maxima[w][threadIdx.x]);
        for (int w = 0; w < teams; ++w)
            l += totals[w][threadIdx.x] * power(maxima[w][threadIdx.x] - m);
        __stcg(of_split + COLUMNS * WIDTH + threadIdx.x, m);
        __stcg(of_split + COLUMNS * (WIDTH + 1) + threadIdx.x, l);
    }
    if (call.splits > 1) {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            before = atomicAdd(call.arrived + place, 1);
            __threadfence();
        }
        __syncthreads();
        if (before < call.splits - 1) return;
        if (threadIdx.x == 0) call.arrived[place] = 0;
    } else {
        __syncthreads();
    }
    half_bits* const out = call.out + first_row * call.heads * dim;
    add_parts<WIDTH, COLUMNS, THREADS, is_rotated<VE>()>(call, parts, columns, out, window, offset);
}

// The router of a layer of experts for up to 32 rows: normalize, choose experts, weigh them, and list
// for each expert its tokens. Twin: route in reference/router.py. A warp has an expert, for some rows.

constexpr int ROWS = ROUTE_ROWS;

constexpr float LARGEST = 3.4e38f;  // instead of infinity

enum { SCORES };

__device__ __forceinline__ float max_of_warp(float value) {
    for (int offset = 16; offset; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// A share of the router's work: some experts for some rows.
struct RouterShare {
    int expert, first, rows;
    const float4* weights;

    __device__ __forceinline__ RouterShare(const Experts& e, int index) {
        const int wide = (e.experts + e.gated + WARPS - 1) / WARPS;
        expert = index % wide * WARPS + threadIdx.x / 32, first = index / wide * ROWS;
        rows = min(ROWS, e.rows - first);
        const int own = min(expert, e.experts + e.gated - 1);
        weights = (const float4*)(e.router + (integer)own * e.size);
    }
    static __device__ __forceinline__ int count(const Experts& e) {
        return (e.experts + e.gated + WARPS - 1) / WARPS * ((e.rows + ROWS - 1) / ROWS);
    }
    __device__ __forceinline__ void begin(const Experts& e) const {  // before there is input
        for (int i = threadIdx.x % 32; i < e.size / 32; i += 32) prefetch(weights + 8 * i);
    }
};

// Normalize rows, and multiply them by the router's weights. rows_at: of x, (ROWS, hidden).
__device__ __forceinline__ void score(const Experts& e, const RouterShare& share, uint4* rows_at) {
    __shared__ float squares[ROWS][WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = e.size / 8;
    const int first = share.first, rows = share.rows, all = e.experts + e.gated;
    const float4* weights = share.weights;
    const uint4* from = (const uint4*)e.entering;
    float square[ROWS] = {};
    for (int c = threadIdx.x; c < pieces; c += 32 * WARPS) {
        uint4 v[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
            v[row] = __ldcg(from + (integer)(first + min(row, rows - 1)) * pieces + c);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float x[8];
            pairs_of(v[row], x);
#pragma unroll
            for (int i = 0; i < 8; ++i) square[row] += x[i] * x[i];
            rows_at[row * pieces + c] = v[row];
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        square[row] = sum_of_warp(square[row]);
        if (lane == 0) squares[row][warp] = square[row];
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        square[row] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) square[row] += squares[row][w];
        square[row] = rsqrtf(square[row] / e.size + e.eps);
    }
    for (int c = threadIdx.x; c < pieces; c += 32 * WARPS) {  // what this thread has read
        uint4 by = {};
        if (e.norm) by = __ldg((const uint4*)e.norm + c);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            uint4 v = rows_at[row * pieces + c];
            if (e.norm) rows_at[row * pieces + c] = v = normed(v, square[row], by);
            if (share.expert < WARPS && row < rows) ((uint4*)e.x)[(integer)(first + row) * pieces + c] = v;
        }
    }
    __syncthreads();
    float total[ROWS] = {};
#pragma unroll 4
    for (int c = lane; c < pieces; c += 32) {
        const float4 low = __ldg(weights + 2 * c), high = __ldg(weights + 2 * c + 1);
        const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float x[8];
            pairs_of(rows_at[row * pieces + c], x);
#pragma unroll
            for (int i = 0; i < 8; ++i) total[row] += x[i] * w[i];
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float sum = sum_of_warp(total[row]);
        if (lane == 0 && row < rows && share.expert < all)
            e.logits[(first + row) * (e.experts + 1) + share.expert] = sum;
    }
    __syncthreads();
}

// A number that orders as floats do; NaN are the lowest, above 0.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The best of values by turns, the highest first, of equal ones that with the lowest index; a lane
// has every 32nd value.
template <class Value> struct Ranking {
    Value value;
    int count;
    u32 taken, most;  // bits of values; the lane's best of the others
    int found;

    __device__ __forceinline__ Ranking(int count, Value value) : value(value), count(count), taken(0) {
        look();
    }
    __device__ __forceinline__ void look() {
        most = 0, found = 0;
#pragma unroll 4
        for (int i = threadIdx.x % 32, bit = 0; i < count; i += 32, ++bit) {
            const u32 v = taken >> bit & 1 ? 0 : ordered(value(i));
            if (v > most) most = v, found = i;
        }
    }
    __device__ __forceinline__ int next() {
        const u32 highest = __reduce_max_sync(~0u, most);
        const int id = __reduce_min_sync(~0u, most == highest ? (u32)found : ~0u);
        if (id % 32 == (int)threadIdx.x % 32) taken |= 1u << (id / 32), look();
        __syncwarp();
        return id;
    }
};
template <class Value> __device__ __forceinline__ Ranking<Value> ranked_by(int count, Value value) {
    return {count, value};
}

// Choose the experts of a row; a lane has one of them. ids: (rows, slots), of experts in `of`: first
// the local ones, then the shared one, then -1.
__device__ __forceinline__ void choose(const Experts& e, int row, float* scores, float* ranked,
                                       int* ids) {
    const int lane = threadIdx.x % 32;
    const float* logits = e.logits + row * (e.experts + 1);
    float most = -LARGEST, sum = 0.0f;
#pragma unroll 4
    for (int i = lane; i < e.experts; i += 32) {
        float z = __ldcg(logits + i);
        if (e.bias) z += e.bias[i];
        scores[i] = z, most = fmaxf(most, z);
    }
    most = max_of_warp(most);
    if (e.scores == SOFTMAX) {
#pragma unroll 4
        for (int i = lane; i < e.experts; i += 32) sum += scores[i] = expf(scores[i] - most);
        sum = sum_of_warp(sum);
    }
#pragma unroll 4
    for (int i = lane; i < e.experts; i += 32) {
        if (e.scores == SOFTMAX) scores[i] /= sum;
        if (e.scores == SIGMOID) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
        ranked[i] = e.correction ? scores[i] + e.correction[i] : scores[i];
    }
    __syncwarp();
    if (e.groups > 1) {
        const int of_group = e.experts / e.groups;
        float first = -LARGEST, second = -LARGEST;
        for (int i = 0; lane < e.groups && i < of_group; ++i) {
            const float v = ranked[lane * of_group + i];
            if (v > first) second = first, first = v;
            else second = fmaxf(second, v);
        }
        const float both = of_group > 1 ? first + second : first;
        u32 kept = 0;
        auto best = ranked_by(e.groups, [&](int) { return both; });
        for (int k = 0; k < e.top_groups; ++k) kept |= 1u << best.next();
        for (int i = lane; i < e.experts; i += 32)
            if (!(kept >> (i / of_group) & 1)) ranked[i] = -LARGEST;
        __syncwarp();
    }
    int own = 0;
    auto best = ranked_by(e.experts, [&](int i) { return ranked[i]; });
    for (int k = 0; k < e.top; ++k) {
        const int id = best.next();
        if (k == lane) own = id;
    }
    const bool is_chosen = lane < e.top;
    float weight = is_chosen ? scores[own] : 0.0f;
    if (e.scores == TOP_SOFTMAX) {
        const float highest = max_of_warp(is_chosen ? weight : -LARGEST);
        weight = is_chosen ? expf(weight - highest) : 0.0f;
        weight /= sum_of_warp(weight);
    }
    if (e.scores == TOP_SIGMOID && is_chosen) weight = 1.0f / (1.0f + expf(-weight));
    if (e.norm_power > 0.0f) {
        const float p = e.norm_power, size = fabsf(weight);
        const float all = sum_of_warp(p == 1.0f ? size : is_chosen ? powf(size, p) : 0.0f);
        weight /= fmaxf(p == 1.0f ? all : powf(all, 1.0f / p), e.least_norm);
    }
    int slot = lane, here = e.top;
    if (e.places) {
        own = is_chosen ? (int)__ldg(e.places + own) : -1;
        const u32 found = __ballot_sync(~0u, own >= 0);
        here = __popc(found), slot = __popc(found & ((1u << lane) - 1));
        if (lane < e.slots) ids[row * e.slots + lane] = -1;
        if (lane == 0) e.added[row] = e.shares - (e.top - here) * __ldg(&e.of->down.parts);
        __syncwarp();
    }
    if (is_chosen && own >= 0) {
        ids[row * e.slots + slot] = own;
        e.weights[row * e.slots + slot] = weight * e.scaling;
    }
    if (e.slots > e.top && lane == 0) {
        ids[row * e.slots + here] = e.held;
        const float z = e.gated ? __ldcg(logits + e.experts) : 0.0f;
        e.weights[row * e.slots + here] =
            e.gated ? from_half(to_half(1.0f / (1.0f + expf(-z)))) : 1.0f;
    }
}

// List the items: of each expert in turn, its tokens in order. counts: (held + 1).
__device__ __forceinline__ void list_items(const Experts& e, const int* ids, int* counts) {
    const int lane = threadIdx.x % 32, experts = e.held + (e.slots > e.top);
    const int all = e.rows * e.slots;
    for (int expert = threadIdx.x; expert < experts; expert += 32 * WARPS) counts[expert] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < all; i += 32 * WARPS)
        if (ids[i] >= 0) atomicAdd(counts + ids[i], 1);
    __syncthreads();
    int first = 0, item = 0, units[2] = {};
    for (int base = 0; base < experts; base += 32) {  // each warp, for its own experts
        const int expert = base + lane, count = expert < experts ? counts[expert] : 0;
        const int items = (count + ITEM_ROWS - 1) / ITEM_ROWS;
        int sides[2] = {};
        if (count) {
            sides[0] = __ldg(&e.of[expert].up.pairs);
            sides[1] = __ldg(&e.of[expert].down.pairs) * __ldg(&e.of[expert].down.parts);
        }
        int upto[4] = {count, items, items * sides[0], items * sides[1]};
        const int own[4] = {upto[0], upto[1], upto[2], upto[3]};
#pragma unroll
        for (int o = 1; o < 32; o *= 2)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int other = __shfl_up_sync(~0u, upto[j], o);
                if (lane >= o) upto[j] += other;
            }
        const int start = first + upto[0] - own[0];
        if (count && base / 32 % WARPS == (int)threadIdx.x / 32)
            for (int n = 0; n < items; ++n) {
                const int begin = start + n * ITEM_ROWS;
                int4* to = (int4*)(e.items + item + upto[1] - own[1] + n);
                to[0] = {expert, min(ITEM_ROWS, count - n * ITEM_ROWS), begin,
                         units[0] + upto[2] - own[2] + n * sides[0]};
                to[1] = {units[1] + upto[3] - own[3] + n * sides[1], sides[0], sides[1], 0};
            }
        __syncthreads();  // all have read these counts
        if (threadIdx.x < 32 && expert < experts) counts[expert] = start;
        first += __shfl_sync(~0u, upto[0], 31), item += __shfl_sync(~0u, upto[1], 31);
        units[0] += __shfl_sync(~0u, upto[2], 31), units[1] += __shfl_sync(~0u, upto[3], 31);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < all; i += 32 * WARPS) {
        if (ids[i] < 0) continue;
        int before = 0;  // of the same expert
#pragma unroll 8
        for (int other = 0; other < i; ++other) before += ids[other] == ids[i];
        e.assigned[counts[ids[i]] + before] = i;
    }
    if (threadIdx.x == 0) *(int4*)e.totals = {item, units[0], units[1], 0};
}

// Route all rows; the last CTA chooses. room: of the CTA, see `plan_of` in experts.py.
__device__ __forceinline__ void route(const Experts& e, byte* room) {
    __shared__ int before;
    int done = 0;
    const int all = RouterShare::count(e);
    for (int i = blockIdx.x; i < all; i += gridDim.x, ++done)
        score(e, RouterShare(e, i), (uint4*)room);
    if (!done) return;
    if (threadIdx.x == 0) {
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
                     : "=r"(before) : "l"(e.arrived), "r"(done) : "memory");
        if (before + done == all) *e.arrived = 0;
    }
    __syncthreads();
    if (before + done != all) return;
    int* ids = (int*)room;
    float* own = (float*)(ids + e.rows * e.slots) + threadIdx.x / 32 * 2 * e.experts;
    for (int row = threadIdx.x / 32; row < e.rows; row += WARPS)
        choose(e, row, own, own + e.experts, ids), __syncwarp();
    __syncthreads();
    list_items(e, ids, ids + e.rows * e.slots);
}

// The router of a layer of experts for up to 32 rows: normalize, choose experts, weigh them, and list
// for each expert its tokens. Twin: route in reference/router.py.
#include "packed.cuh"
#include "early.cuh"
#include "experts.cuh"

constexpr int WARPS = ROUTE_WARPS, ROWS = ROUTE_ROWS;  // per CTA: a warp has an expert, for these rows

constexpr float LARGEST = 3.4e38f;  // in place of infinity

enum { SCORES };

__device__ __forceinline__ float max_of_warp(float value) {
    for (int offset = 16; offset; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// Normalize rows, and multiply them by the router's weights.
__device__ __forceinline__ void score(const Experts& e) {
    __shared__ float sizes[ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = e.size / 8;
    const int first = blockIdx.y * ROWS, rows = min(ROWS, e.rows - first);
    const int expert = blockIdx.x * WARPS + warp, all = e.experts + e.gated;
    for (int row = warp; row < rows; row += WARPS) {
        const uint4* from = (const uint4*)(e.hidden + (integer)(first + row) * e.size);
        float square = 0.0f;
        for (int c = lane; c < pieces; c += 32) {
            float x[8];
            pairs_of(__ldcg(from + c), x);
#pragma unroll
            for (int i = 0; i < 8; ++i) square += x[i] * x[i];
        }
        square = sum_of_warp(square);
        if (lane == 0) sizes[row] = rsqrtf(square / e.size + e.eps);
    }
    __syncthreads();
    float total[ROWS] = {};
    const float4* weights = (const float4*)(e.router + (integer)min(expert, all - 1) * e.size);
    for (int c = lane; c < pieces; c += 32) {
        const float4 low = __ldg(weights + 2 * c), high = __ldg(weights + 2 * c + 1);
        const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        uint4 by = {};
        if (e.norm) by = __ldg((const uint4*)e.norm + c);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (row >= rows) break;
            const integer at = (integer)(first + row) * pieces + c;
            uint4 v = __ldcg((const uint4*)e.hidden + at);
            if (e.norm) v = normed(v, sizes[row], by);
            if (blockIdx.x == 0 && c / 32 % WARPS == warp) ((uint4*)e.x)[at] = v;
            float x[8];
            pairs_of(v, x);
#pragma unroll
            for (int i = 0; i < 8; ++i) total[row] += x[i] * w[i];
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float sum = sum_of_warp(total[row]);
        if (lane == 0 && row < rows && expert < all)
            e.logits[(first + row) * (e.experts + 1) + expert] = sum;
    }
}

// A warp's best of values it has not taken: the highest, of equal ones the first.
template <class Value> __device__ __forceinline__ int best(int count, u32 taken, Value value) {
    float most = -LARGEST;
    int found = 1 << 30;
    for (int i = threadIdx.x % 32, bit = 0; i < count; i += 32, ++bit) {
        if (taken >> bit & 1) continue;
        const float v = value(i);
        if (v > most || found == 1 << 30) most = v, found = i;
    }
    for (int offset = 16; offset; offset >>= 1) {
        const float other = __shfl_xor_sync(~0u, most, offset);
        const int id = __shfl_xor_sync(~0u, found, offset);
        if (id != 1 << 30 && (found == 1 << 30 || other > most || (other == most && id < found)))
            most = other, found = id;
    }
    return __shfl_sync(~0u, found, 0);  // with NaN, lanes may disagree
}

// Choose the experts of a row; a lane has one of them.
__device__ __forceinline__ void choose(const Experts& e, int row, float* scores, float* ranked) {
    const int lane = threadIdx.x % 32;
    const float* logits = e.logits + row * (e.experts + 1);
    float most = -LARGEST, sum = 0.0f;
    for (int i = lane; i < e.experts; i += 32) {
        float z = __ldcg(logits + i);
        if (e.bias) z += e.bias[i];
        scores[i] = z, most = fmaxf(most, z);
    }
    most = max_of_warp(most);
    if (e.scores == SOFTMAX) {
        for (int i = lane; i < e.experts; i += 32) sum += scores[i] = expf(scores[i] - most);
        sum = sum_of_warp(sum);
    }
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
        for (int k = 0; k < e.top_groups; ++k)
            kept |= 1u << best(e.groups, kept >> lane & 1, [&](int) { return both; });
        for (int i = lane; i < e.experts; i += 32)
            if (!(kept >> (i / of_group) & 1)) ranked[i] = -LARGEST;
        __syncwarp();
    }
    u32 taken = 0;
    int own = 0;
    for (int k = 0; k < e.top; ++k) {
        const int id = best(e.experts, taken, [&](int i) { return ranked[i]; });
        if (id % 32 == lane) taken |= 1u << (id / 32);
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
    if (is_chosen) e.ids[row * e.slots + lane] = own, e.weights[row * e.slots + lane] = weight * e.scaling;
    if (e.slots > e.top && lane == 0) {
        e.ids[row * e.slots + e.top] = e.experts;
        const float z = e.gated ? __ldcg(logits + e.experts) : 0.0f;
        e.weights[row * e.slots + e.top] =
            e.gated ? from_half(to_half(1.0f / (1.0f + expf(-z)))) : 1.0f;
    }
}

// List the items: of each expert in turn, its tokens in order.
__device__ __forceinline__ void list_items(const Experts& e, int* before) {
    const int lane = threadIdx.x % 32, experts = e.experts + (e.slots > e.top);
    const int all = e.rows * e.slots;
    auto assigned = [&](int expert, auto then) {
        int count = 0;
        for (int i = 0; i < all; ++i)
            if (e.ids[i] == expert) then(count++, i);
        return count;
    };
    for (int i = threadIdx.x; i < experts; i += 32 * WARPS)
        before[i] = assigned(i, [](int, int) {});
    __syncthreads();
    int first = 0, item = 0, units[2] = {};
    for (int base = 0; base < experts; base += 32) {  // each warp, for its own experts
        const int i = base + lane;
        const int count = i < experts ? before[i] : 0, items = (count + ITEM_ROWS - 1) / ITEM_ROWS;
        int sides[2] = {};
        if (count) {
            sides[0] = e.of[i].up.pairs * e.of[i].up.parts;
            sides[1] = e.of[i].down.pairs * e.of[i].down.parts;
        }
        int upto[4] = {count, items, items * sides[0], items * sides[1]};
        const int own[4] = {upto[0], upto[1], upto[2], upto[3]};
        for (int o = 1; o < 32; o *= 2)
            for (int j = 0; j < 4; ++j) {
                const int other = __shfl_up_sync(~0u, upto[j], o);
                if (lane >= o) upto[j] += other;
            }
        if (count && base / 32 % WARPS == (int)threadIdx.x / 32) {
            const int start = first + upto[0] - own[0];
            assigned(i, [&](int n, int at) { e.assigned[start + n] = at; });
            for (int n = 0; n < items; ++n)
                e.items[item + upto[1] - own[1] + n] = {
                    i, min(ITEM_ROWS, count - n * ITEM_ROWS), start + n * ITEM_ROWS,
                    {units[0] + upto[2] - own[2] + n * sides[0],
                     units[1] + upto[3] - own[3] + n * sides[1]}};
        }
        first += __shfl_sync(~0u, upto[0], 31), item += __shfl_sync(~0u, upto[1], 31);
        for (int j = 0; j < 2; ++j) units[j] += __shfl_sync(~0u, upto[2 + j], 31);
    }
    if (threadIdx.x == 0) e.totals[0] = item, e.totals[1] = units[0], e.totals[2] = units[1];
}

// Grid: (experts / WARPS, rows / ROWS). The last CTA to arrive chooses.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    route(const __grid_constant__ Experts e) {
    extern __shared__ float room[];  // scores and ranks of a row per warp; then counts of experts
    __shared__ int before;
    let_the_next_begin();
    wait_for_input();
    score(e);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(e.arrived, 1);
        __threadfence();
        if (before == gridDim.x * gridDim.y - 1) *e.arrived = 0;
    }
    __syncthreads();
    if (before != gridDim.x * gridDim.y - 1) return;
    float* own = room + threadIdx.x / 32 * 2 * e.experts;
    for (int row = threadIdx.x / 32; row < e.rows; row += WARPS)
        choose(e, row, own, own + e.experts), __syncwarp();
    __syncthreads();
    list_items(e, (int*)room);
}

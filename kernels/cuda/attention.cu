// Attention of one new token per sequence to a paged cache, which is read as it is stored. A CTA has
// a part of the positions of a sequence and a head of keys; its warps take 16 positions at a time,
// whose scores and values are products of tensor cores with all query heads of that head as rows.
// Rotated elements are never rotated back: the queries are rotated once, and the sum of the values.
// With angles it rotates the positions of queries and of the new key, and stores key and value.
#include "packed.cuh"
#include "cache_rows.cuh"
#include "early.cuh"

#define HEADS 16  // query heads of a key head, the rows of an mma
#define NOTHING -1e30f

// Multiply the even and the odd places of every 64 numbers by H₃₂; a warp.
__device__ __forceinline__ void rotate(float* x, int count, int lane) {
    for (int unit = 0; unit < count; unit += 64)
        for (int odd = 0; odd < 2; ++odd) {
            float v = x[unit + 2 * lane + odd];
            for (int s = 1; s < 32; s <<= 1) {
                const float other = __shfl_xor_sync(~0u, v, s);
                v = lane & s ? other - v : v + other;
            }
            x[unit + 2 * lane + odd] = v;
        }
    __syncwarp();
}

struct Call {  // fp16: q, out (b, heads, HD); k, v (b, kv_heads, HD) of the new token
    const half_bits *q, *k, *v;
    Rows keys, values;
    const int *tables, *lengths;  // (b, pages); (b,)
    float* partial;               // (b, kv_heads, splits, HEADS, HD + 2)
    int* arrived;                 // (b, kv_heads), zero before and after
    half_bits* out;
    const float *cosines, *sines;  // (b or 1, half), of the new positions; or null
    const integer* slots;          // (b), where key and value of the new tokens go
    int heads, kv_heads, pages, splits, window;  // window 0: none
    int half, angle_step;                        // angle_step: from a sequence to the next
    float scale, softcap;                        // softcap 0: none

    // Element i of a head, whose position is rotated if there are angles.
    __device__ __forceinline__ float rotated(const half_bits* x, int i, int row) const {
        const float value = from_half(x[i]);
        if (!cosines || i >= 2 * half) return value;
        const float other = from_half(x[i < half ? i + half : i - half]);
        const int angle = row * angle_step + i % half;
        const float c = __fmul_rn(value, cosines[angle]), s = __fmul_rn(other, sines[angle]);
        return from_half(to_half(i < half ? __fsub_rn(c, s) : __fadd_rn(c, s)));
    }
};

// What a lane reads of 16 positions, from a slot on: its quarter of the keys of positions g and
// 8 + g, its eighth of the values of 2 t, 2 t + 1, 2 t + 8, 2 t + 9. Those not `left` count as zero.
template <int HD, int KE, int VE> struct Positions {
    static constexpr int KEYS = HD / 4 * bits_of<KE>() / 32, VALUES = HD / 8 * bits_of<VE>() / 32;
    u32 keys[2][KEYS], values[4][VALUES];
    half_bits key_scales[2], value_scales[4];  // as they are: nothing waits for them here

    __device__ __forceinline__ void read(const Call& call, integer slot, int left, int kv,
                                         int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const integer at = (slot + g + 8 * i) * call.kv_heads + kv;
            load<KEYS>(keys[i], call.keys.data + (at * 4 + t) * (KEYS * 4));
            if constexpr (is_rotated<KE>())
                key_scales[i] = __ldg(call.keys.scales + (at * 4 + t) * HD / 128);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int position = 2 * t + i % 2 + 8 * (i / 2);
            const integer at = (slot + position) * call.kv_heads + kv;
            if (position < left) {
                load<VALUES>(values[i], call.values.data + (at * 8 + g) * (VALUES * 4));
                if constexpr (is_rotated<VE>())
                    value_scales[i] = __ldg(call.values.scales + (at * 8 + g) * HD / 256);
            } else {
                value_scales[i] = 0;
#pragma unroll
                for (int w = 0; w < VALUES; ++w) values[i][w] = 0;
            }
        }
    }
};

template <int HD, int KE, int VE> __device__ __forceinline__ void attend(const Call& call) {
    constexpr int QUARTER = HD / 4, EIGHTH = HD / 8;
    using Held = Positions<HD, KE, VE>;
    constexpr int APART = 2 * ATTENTION_WARPS;  // rows in which warps do not meet, of few heads
    __shared__ float sums[HEADS > APART ? HEADS : APART][HD];
    __shared__ float maxima[ATTENTION_WARPS][HEADS], totals[ATTENTION_WARPS][HEADS];
    __shared__ float new_key[HD], new_value[HD], selves[HEADS];
    __shared__ __align__(16) u32 queries[HEADS][HD / 2 + 4];  // pairs as a lane has them
    __shared__ int before;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, kv = blockIdx.y, row = blockIdx.z;
    const int group = call.heads / call.kv_heads;
    let_the_next_begin();
    wait_for_input();
    const int length = call.lengths[row], from = call.window ? max(0, length + 1 - call.window) : 0;
    const int tiles = (length + 15) / 16, first = from / 16;
    const int each = (tiles - first + call.splits - 1) / call.splits;
    const int begin = first + split * each, end = min(tiles, begin + each);
    const int* table = call.tables + (integer)row * call.pages;
    auto read = [&](Held& held, int tile) {
        if (tile >= end) return;
        const integer page = table[tile * 16 / PAGE_TOKENS];
        const integer slot = page * PAGE_TOKENS + tile * 16 % PAGE_TOKENS;
        held.read(call, slot, length - tile * 16, kv, lane);
    };
    Held held, next;
    read(held, begin + warp);
    const integer own_q = ((integer)row * call.heads + kv * group) * HD;
    const integer own_k = ((integer)row * call.kv_heads + kv) * HD;
    for (int i = threadIdx.x; i < (group + 2) * HD; i += blockDim.x) {
        const int head = i / HD, e = i % HD;
        if (head < group) sums[head][e] = call.rotated(call.q + own_q + head * HD, e, row);
        else if (head == group) new_key[e] = call.rotated(call.k + own_k, e, row);
        else new_value[e] = from_half(call.v[own_k + e]);
    }
    __syncthreads();
    if (split == 0 && call.slots)
        for (int unit = warp; unit < HD / 32; unit += ATTENTION_WARPS) {  // of key, of value
            const bool is_key = unit < HD / 64;
            const int in_head = unit % (HD / 64) * 64 + 2 * lane;
            const float* from = (is_key ? new_key : new_value) + in_head;
            const half_bits two[2] = {to_half(from[0]), to_half(from[1])};
            const integer at = (call.slots[row] * call.kv_heads + kv) * HD + in_head;
            store(is_key ? call.keys : call.values, is_key ? KE : VE, at, two, lane);
        }
    for (int head = warp; head < group; head += ATTENTION_WARPS) {
        float s = 0.0f;  // with the new key
        for (int i = lane; i < HD; i += 32) s += sums[head][i] * new_key[i];
        for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
        s *= call.scale;
        if (call.softcap > 0.0f) s = call.softcap * tanhf(s / call.softcap);
        if (lane == 0) selves[head] = s;
        if constexpr (is_rotated<KE>()) rotate(sums[head], HD, lane);
    }
    __syncthreads();
    // a lane has quarter t of heads g and 8 + g; rotating twice multiplies by 32
    const float factor = call.scale / (is_rotated<KE>() ? 32.0f : 1.0f);
    for (int i = threadIdx.x; i < group * HD / 2; i += blockDim.x) {
        const int head = i / (HD / 2), pair = i % (HD / 2);
        const float* quarter = sums[head] + pair / (QUARTER / 2) * QUARTER;
        const int in_quarter = pair % (QUARTER / 2);
        queries[head][pair] = halves(quarter[first_of<KE>(in_quarter)] * factor,
                                     quarter[second_of<KE>(in_quarter)] * factor);
    }
    __syncthreads();
    u32 low[QUARTER / 2], high[QUARTER / 2];
#pragma unroll
    for (int i = 0; i < QUARTER / 2; i += 4) {
        const uint4 none = {0, 0, 0, 0};
        const uint4 a = g < group ? *(const uint4*)(queries[g] + t * QUARTER / 2 + i) : none;
        const uint4 b =
            g + 8 < group ? *(const uint4*)(queries[g + 8] + t * QUARTER / 2 + i) : none;
        low[i] = a.x, low[i + 1] = a.y, low[i + 2] = a.z, low[i + 3] = a.w;
        high[i] = b.x, high[i + 1] = b.y, high[i + 2] = b.z, high[i + 3] = b.w;
    }

    float o[EIGHTH][4] = {}, most[2] = {NOTHING, NOTHING}, total[2] = {};
    auto add = [&](const Held& held, int tile) {
        float s[2][4] = {};
        u32 value_scales[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const u32 key_scale = twice(held.key_scales[n]);
            value_scales[n] = held.value_scales[2 * n] | (u32)held.value_scales[2 * n + 1] << 16;
#pragma unroll
            for (int i = 0; i < QUARTER / 2; i += 2) {
                const u32 a[4] = {low[i], high[i], low[i + 1], high[i + 1]};
                mma(s[n], a, along<KE>(held.keys[n], i, key_scale),
                    along<KE>(held.keys[n], i + 1, key_scale));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int position = tile * 16 + 8 * n + 2 * t + i % 2;
                if (call.softcap > 0.0f) s[n][i] = call.softcap * tanhf(s[n][i] / call.softcap);
                if (position >= length || position < from) s[n][i] = NOTHING;
            }
        }
        float p[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // heads g and 8 + g
            float m = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
            m = fmaxf(fmaxf(m, s[1][2 * h]), s[1][2 * h + 1]);
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(fmaxf(m, __shfl_xor_sync(~0u, m, 2)), most[h]);
            const float shrink = __expf(most[h] - m);
            most[h] = m;
            total[h] *= shrink;
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const float score = s[v / 2][2 * h + v % 2];
                const float weight = score <= NOTHING ? 0.0f : __expf(score - m);
                p[v / 2][2 * h + v % 2] = weight;
                total[h] += weight;
            }
#pragma unroll
            for (int j = 0; j < EIGHTH; ++j) o[j][2 * h] *= shrink, o[j][2 * h + 1] *= shrink;
        }
        const u32 a[4] = {halves(p[0][0], p[0][1]), halves(p[0][2], p[0][3]),
                          halves(p[1][0], p[1][1]), halves(p[1][2], p[1][3])};
#pragma unroll
        for (int j = 0; j < EIGHTH; ++j)
            mma(o[j], a, across<VE>(held.values[0], held.values[1], j, value_scales[0]),
                across<VE>(held.values[2], held.values[3], j, value_scales[1]));
    };
    constexpr bool AHEAD = sizeof(Held) <= 160;  // the next positions fit beside these
    for (int tile = begin + warp; tile < end; tile += ATTENTION_WARPS) {
        if constexpr (AHEAD) read(next, tile + ATTENTION_WARPS);
        add(held, tile);
        if constexpr (AHEAD) held = next;
        else read(held, tile + ATTENTION_WARPS);
    }

    // o[j]: of head g elements EIGHTH · 2 t + j and EIGHTH · (2 t + 1) + j, then of head 8 + g
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        if (t == 0) maxima[warp][g + 8 * h] = most[h], totals[warp][g + 8 * h] = total[h];
    }
    const bool is_apart = group <= APART / ATTENTION_WARPS;  // each warp has rows of its own
    if (!is_apart)
        for (int i = threadIdx.x; i < HEADS * HD; i += blockDim.x) sums[i / HD][i % HD] = 0.0f;
    __syncthreads();
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float m = NOTHING;
        for (int w = 0; w < ATTENTION_WARPS; ++w) m = fmaxf(m, maxima[w][g + 8 * h]);
        shrink[h] = __expf(most[h] - m);
    }
    auto put = [&](bool adds, int first_row) {
#pragma unroll
        for (int j = 0; j < EIGHTH; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int head = g + 8 * (i / 2), to = EIGHTH * (2 * t + i % 2) + j;
                if (head >= group) continue;
                float& sum = sums[first_row + head][to];
                sum = (adds ? sum : 0.0f) + o[j][i] * shrink[i / 2];
            }
    };
    if (is_apart) {
        put(false, warp * group);
        __syncthreads();
        for (int i = threadIdx.x; i < group * HD; i += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < ATTENTION_WARPS; ++w) sum += sums[w * group + i / HD][i % HD];
            sums[i / HD][i % HD] = sum;  // what no other thread reads
        }
        __syncthreads();
    } else {
        for (int w = 0; w < ATTENTION_WARPS; ++w) {  // in the order of warps
            if (warp == w) put(true, 0);
            __syncthreads();
        }
    }
    const integer place = ((integer)row * call.kv_heads + kv) * call.splits;
    float* own = call.partial + (place + split) * HEADS * (HD + 2);
    for (int i = threadIdx.x; i < group * HD; i += blockDim.x)
        __stcg(own + i / HD * (HD + 2) + i % HD, sums[i / HD][i % HD]);
    if (threadIdx.x < group) {
        float m = NOTHING, l = 0.0f;
        for (int w = 0; w < ATTENTION_WARPS; ++w) m = fmaxf(m, maxima[w][threadIdx.x]);
        for (int w = 0; w < ATTENTION_WARPS; ++w)
            l += totals[w][threadIdx.x] * __expf(maxima[w][threadIdx.x] - m);
        __stcg(own + threadIdx.x * (HD + 2) + HD, m);
        __stcg(own + threadIdx.x * (HD + 2) + HD + 1, l);
    }
    __threadfence();
    __syncthreads();
    int* arrived = call.arrived + row * call.kv_heads + kv;
    if (threadIdx.x == 0) before = atomicAdd(arrived, 1);
    __syncthreads();
    if (before < call.splits - 1) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    for (int head = warp; head < group; head += ATTENTION_WARPS) {  // all parts, and the new token
        const integer at = own_q + head * HD;
        const float s = selves[head];
        // lane i knows part i
        const float* parts = call.partial + place * HEADS * (HD + 2) + head * (HD + 2);
        const float* of_lane = parts + (integer)lane * HEADS * (HD + 2) + HD;
        const bool is_part = lane < call.splits;
        float early[4][HD / 32];  // of the first parts, which are all where sequences are short
#pragma unroll
        for (int i = 0; i < HD / 8; ++i)
            if (i / (HD / 32) < call.splits)
                early[i / (HD / 32)][i % (HD / 32)] =
                    __ldcg(parts + (integer)(i / (HD / 32)) * HEADS * (HD + 2) + lane +
                           32 * (i % (HD / 32)));
        const float part_most = is_part ? __ldcg(of_lane) : NOTHING;
        const float part_total = is_part ? __ldcg(of_lane + 1) : 0.0f;
        float m = fmaxf(s, part_most);
        for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
        const float weight = __expf(part_most - m), self = __expf(s - m);
        float l = weight * part_total;
        for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
        l += self;
        float values[HD / 32] = {};
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const float of_part = __shfl_sync(~0u, weight, part);
            if (part < call.splits)
#pragma unroll
                for (int i = 0; i < HD / 32; ++i) values[i] += of_part * early[part][i];
        }
#pragma unroll 4
        for (int part = 4; part < call.splits; ++part) {
            const float of_part = __shfl_sync(~0u, weight, part);
#pragma unroll
            for (int i = 0; i < HD / 32; ++i)
                values[i] +=
                    of_part * __ldcg(parts + (integer)part * HEADS * (HD + 2) + lane + 32 * i);
        }
#pragma unroll
        for (int i = 0; i < HD / 32; ++i) sums[head][lane + 32 * i] = values[i];
        __syncwarp();
        if constexpr (is_rotated<VE>()) rotate(sums[head], HD, lane);
        const float back = is_rotated<VE>() ? 1.0f / 32.0f : 1.0f;
        for (int i = lane; i < HD; i += 32) {
            const float value = sums[head][i] * back + self * new_value[i];
            call.out[at + i] = to_half(value / l);
        }
    }
}

#define ATTEND(NAME, HD, KE, VE)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * ATTENTION_WARPS) NAME##_##HD(               \
        const __grid_constant__ Call call) {                                                      \
        attend<HD, KE, VE>(call);                                                                 \
    }
#define FORMATS(HD)                                                                               \
    ATTEND(half_half, HD, HALF, HALF)                                                             \
    ATTEND(upper_byte_upper_byte, HD, UPPER_BYTE, UPPER_BYTE)                                     \
    ATTEND(rotated_8_rotated_8, HD, ROTATED_8, ROTATED_8)                                         \
    ATTEND(rotated_8_rotated_4, HD, ROTATED_8, ROTATED_4)                                         \
    ATTEND(rotated_4_rotated_4, HD, ROTATED_4, ROTATED_4)
FORMATS(64)
FORMATS(128)

// Keys or values x fp16 (t, width) of slots int64 (t,), as `torch_cache.encode` stores them: a warp
// has 64 elements. element: as above.
extern "C" __global__ void write_rows(const half_bits* x, const integer* slots, byte* data,
                                      half_bits* scales, integer width, integer element) {
    const int lane = threadIdx.x % 32, unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const integer padded = (width + 63) / 64 * 64, at = unit * 64 + 2 * lane;
    if (unit * 64 >= padded) return;
    half_bits two[2];
    for (int i = 0; i < 2; ++i) two[i] = at + i < width ? x[blockIdx.x * width + at + i] : 0;
    store({data, scales}, element, slots[blockIdx.x] * padded + at, two, lane);
}

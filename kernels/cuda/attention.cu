// Attention of one new token per sequence to a paged cache, which is read as it is stored. A CTA has
// a part of the positions of a sequence and a head of keys; its warps take 16 positions at a time,
// whose scores and values are products of tensor cores with all query heads of that head as rows.
// Rotated elements are never rotated back: the queries are rotated once, and the sum of the values.
#include "packed.cuh"

#define HEADS 16  // query heads of a key head, the rows of an mma
#define NOTHING -1e30f

enum { HALF = 0, UPPER_BYTE = 1, ROTATED_8 = 2, ROTATED_4 = 3 };

template <int E> __device__ __forceinline__ constexpr int bits_of() {
    return E == HALF ? 16 : E == ROTATED_4 ? 4 : 8;
}
template <int E> __device__ __forceinline__ constexpr bool is_rotated() { return E >= ROTATED_8; }

__device__ __forceinline__ u32 halves(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

template <int N> __device__ __forceinline__ void load(u32* w, const byte* from) {
    if constexpr (N >= 4) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 v = __ldg((const uint4*)(from + 4 * i));
            w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
        }
    } else if constexpr (N == 2) {
        const uint2 v = __ldg((const uint2*)from);
        w[0] = v.x, w[1] = v.y;
    } else {
        w[0] = __ldg((const u32*)from);
    }
}

// Pair i of the elements in a lane's words, scaled, and which elements these are.
template <int E> __device__ __forceinline__ u32 along(const u32* w, int i, u32 scale) {
    if constexpr (E == HALF) return w[i];
    if constexpr (E == UPPER_BYTE) return __byte_perm(w[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
    if constexpr (E == ROTATED_8) {
        const u32 codes = __byte_perm(w[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140);
        return times(less(codes, 0x64806480u), scale);
    }
    const u32 codes = pick(w[i / 4] >> (4 * (i % 4)), 0x000f000fu, 0x64006400u);
    return times(less(codes, 0x64086408u), scale);
}
template <int E> __device__ __forceinline__ int first_of(int i) {
    return E == ROTATED_4 ? 8 * (i / 4) + i % 4 : 2 * i;
}
template <int E> __device__ __forceinline__ int second_of(int i) {
    return E == ROTATED_4 ? 8 * (i / 4) + i % 4 + 4 : 2 * i + 1;
}

// Element j of two positions, scaled: a from the words of the first, b from those of the second.
template <int E>
__device__ __forceinline__ u32 across(const u32* a, const u32* b, int j, u32 scale) {
    if constexpr (E == HALF) return __byte_perm(a[j / 2], b[j / 2], j % 2 ? 0x7632 : 0x5410);
    if constexpr (E == ROTATED_4) {
        const u32 both = __byte_perm(a[j / 8], b[j / 8], j % 8 < 4 ? 0x5410 : 0x7632);
        const u32 codes = pick(both >> (4 * (j % 4)), 0x000f000fu, 0x64006400u);
        return times(less(codes, 0x64086408u), scale);
    }
    const u32 both = __byte_perm(a[j / 4], b[j / 4], j % 4 | (j % 4 + 4) << 4);
    if constexpr (E == UPPER_BYTE) return __byte_perm(both, 0, 0x1404);
    return times(less(__byte_perm(both, 0x64646464u, 0x4140), 0x64806480u), scale);
}

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

struct Rows {  // keys or values of a layer by slot: bytes; scales fp16 by run of 32
    const byte* data;
    const half_bits* scales;
};

struct Call {  // fp16: q, out (b, heads, HD); k, v (b, kv_heads, HD) of the new token
    const half_bits *q, *k, *v;
    Rows keys, values;
    const int *tables, *lengths;  // (b, pages); (b,)
    float* partial;               // (b, kv_heads, splits, HEADS, HD + 2)
    int* arrived;                 // (b, kv_heads), zero before and after
    half_bits* out;
    int heads, kv_heads, pages, splits, window;  // window 0: none
    float scale, softcap;                        // softcap 0: none
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
    __shared__ float sums[HEADS][HD];
    __shared__ float maxima[ATTENTION_WARPS][HEADS], totals[ATTENTION_WARPS][HEADS];
    __shared__ int before;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, kv = blockIdx.y, row = blockIdx.z;
    const int group = call.heads / call.kv_heads;
    const int length = call.lengths[row], from = call.window ? max(0, length + 1 - call.window) : 0;
    const int tiles = (length + 15) / 16, first = from / 16;
    const int each = (tiles - first + call.splits - 1) / call.splits;
    const int begin = first + split * each, end = min(tiles, begin + each);
    const integer own_q = ((integer)row * call.heads + kv * group) * HD;
    for (int i = threadIdx.x; i < HEADS * HD; i += blockDim.x)
        sums[i / HD][i % HD] = i / HD < group ? from_half(call.q[own_q + i]) : 0.0f;
    __syncthreads();
    if constexpr (is_rotated<KE>())
        for (int head = warp; head < group; head += ATTENTION_WARPS) rotate(sums[head], HD, lane);
    __syncthreads();
    // a lane has quarter t of heads g and 8 + g; rotating twice multiplies by 32
    const float factor = call.scale / (is_rotated<KE>() ? 32.0f : 1.0f);
    u32 low[QUARTER / 2], high[QUARTER / 2];
#pragma unroll
    for (int i = 0; i < QUARTER / 2; ++i) {
        const int a = t * QUARTER + first_of<KE>(i), b = t * QUARTER + second_of<KE>(i);
        low[i] = halves(sums[g][a] * factor, sums[g][b] * factor);
        high[i] = halves(sums[g + 8][a] * factor, sums[g + 8][b] * factor);
    }
    __syncthreads();

    float o[EIGHTH][4] = {}, most[2] = {NOTHING, NOTHING}, total[2] = {};
    const int* table = call.tables + (integer)row * call.pages;
    auto read = [&](Held& held, int tile) {
        if (tile >= end) return;
        const integer page = table[tile * 16 / PAGE_TOKENS];
        const integer slot = page * PAGE_TOKENS + tile * 16 % PAGE_TOKENS;
        held.read(call, slot, length - tile * 16, kv, lane);
    };
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
    Held held, next;
    read(held, begin + warp);
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
    for (int i = threadIdx.x; i < HEADS * HD; i += blockDim.x) sums[i / HD][i % HD] = 0.0f;
    __syncthreads();
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float m = NOTHING;
        for (int w = 0; w < ATTENTION_WARPS; ++w) m = fmaxf(m, maxima[w][g + 8 * h]);
        shrink[h] = __expf(most[h] - m);
    }
    for (int w = 0; w < ATTENTION_WARPS; ++w) {  // in the order of warps
        if (warp == w)
#pragma unroll
            for (int j = 0; j < EIGHTH; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int head = g + 8 * (i / 2), to = EIGHTH * (2 * t + i % 2) + j;
                    if (head < group) sums[head][to] += o[j][i] * shrink[i / 2];
                }
        __syncthreads();
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
        const integer at = own_q + head * HD, new_at = ((integer)row * call.kv_heads + kv) * HD;
        float s = 0.0f;
        for (int i = lane; i < HD; i += 32)
            s += from_half(call.q[at + i]) * from_half(call.k[new_at + i]);
        for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
        s *= call.scale;
        if (call.softcap > 0.0f) s = call.softcap * tanhf(s / call.softcap);
        // lane i knows part i
        const float* parts = call.partial + place * HEADS * (HD + 2) + head * (HD + 2);
        const float* of_lane = parts + (integer)lane * HEADS * (HD + 2) + HD;
        const bool is_part = lane < call.splits;
        const float part_most = is_part ? __ldcg(of_lane) : NOTHING;
        const float part_total = is_part ? __ldcg(of_lane + 1) : 0.0f;
        float m = fmaxf(s, part_most);
        for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
        const float weight = __expf(part_most - m), self = __expf(s - m);
        float l = weight * part_total;
        for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
        l += self;
        float values[HD / 32] = {};
#pragma unroll 4
        for (int part = 0; part < call.splits; ++part) {
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
            const float value = sums[head][i] * back + self * from_half(call.v[new_at + i]);
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
    const integer padded = (width + 63) / 64 * 64, slot = slots[blockIdx.x];
    const integer at = unit * 64 + 2 * lane;
    if (unit * 64 >= padded) return;
    half_bits two[2];
    float v[2];
    for (int i = 0; i < 2; ++i) {
        two[i] = at + i < width ? x[blockIdx.x * width + at + i] : 0;
        v[i] = from_half(two[i]);
    }
    if (element == HALF) {
        ((u32*)data)[(slot * padded + at) / 2] = two[0] | (u32)two[1] << 16;
        return;
    }
    if (element == UPPER_BYTE) {
        ((unsigned short*)data)[(slot * padded + at) / 2] = (two[0] >> 8) | (two[1] & 0xff00);
        return;
    }
    for (int i = 0; i < 2; ++i)
        for (int s = 1; s < 32; s <<= 1) {
            const float other = __shfl_xor_sync(~0u, v[i], s);
            v[i] = lane & s ? other - v[i] : v[i] + other;
        }
    const float center = element == ROTATED_8 ? 128.0f : 8.0f;
    float largest = fmaxf(fabsf(v[0]), fabsf(v[1]));
    for (int s = 1; s < 16; s <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, s));
    largest = fminf(largest, 65504.0f * center);
    u32 codes[2];
    for (int i = 0; i < 2; ++i) {
        const float code = (largest > 0.0f ? __fdiv_rn(v[i], largest) : 0.0f) * center + center;
        codes[i] = (u32)clamped(rintf(code), 0.0f, 2.0f * center - 1.0f);
    }
    if (element == ROTATED_8)
        ((unsigned short*)data)[(slot * padded + at) / 2] = codes[0] | codes[1] << 8;
    else
        data[(slot * padded + at) / 2] = codes[0] | codes[1] << 4;
    if (lane % 16 == 0) scales[(slot * padded + at) / 32] = to_half(largest / center);
}

// How elements of keys and values are stored, and what tensor cores are fed of them; the order is
// that of `Element` in cache_formats.py.

enum { HALF = 0, UPPER_BYTE = 1, ROTATED_8 = 2, ROTATED_4 = 3 };

template <int E> __device__ __forceinline__ constexpr int bits_of() {
    return E == HALF ? 16 : E == ROTATED_4 ? 4 : 8;
}
template <int E> __device__ __forceinline__ constexpr bool is_rotated() { return E >= ROTATED_8; }

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

struct Rows {  // keys or values of a layer by slot: bytes; scales fp16 by run of 32
    byte* data;
    half_bits* scales;
};

// Store elements 2 lane, 2 lane + 1 of 64 as `torch_cache.encode` does; at: of the first; a warp.
__device__ __forceinline__ void store(const Rows& rows, int element, integer at,
                                      const half_bits* two, int lane) {
    if (element == HALF) {
        ((u32*)rows.data)[at / 2] = two[0] | (u32)two[1] << 16;
        return;
    }
    if (element == UPPER_BYTE) {
        ((unsigned short*)rows.data)[at / 2] = (two[0] >> 8) | (two[1] & 0xff00);
        return;
    }
    float v[2] = {from_half(two[0]), from_half(two[1])};
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
        ((unsigned short*)rows.data)[at / 2] = codes[0] | codes[1] << 8;
    else
        rows.data[at / 2] = codes[0] | codes[1] << 4;
    if (lane % 16 == 0) rows.scales[at / 32] = to_half(largest / center);
}

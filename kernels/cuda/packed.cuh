// The layout of matrices on the GPU at inference: tiles of 32 columns, panels of 32 rows with codes
// in the places of an mma's operand. packed.py writes it, docs/concepts/decoding.md
// draws it.
#include "exl2.cuh"

typedef unsigned u32;

__device__ __forceinline__ u32 pick(u32 a, u32 mask, u32 other) {  // a & mask | other
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(other));
    return r;
}
__device__ __forceinline__ u32 less(u32 a, u32 b) {
    u32 r;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 halves(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 turned(u32 a, int by) { return __funnelshift_r(a, a, by); }
__device__ __forceinline__ constexpr u32 twice(u32 a) { return a | a << 16; }

__device__ __forceinline__ void pairs_of(const uint4& v, float* x) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = from_half(w[i / 2] >> (16 * (i % 2)));
}

__device__ __forceinline__ void mma(float* d, const u32* a, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The offset of a code of fragment f (m-tile f / 2, k-step f % 2) as an fp16 pair: fields that
// begin at bit 0, 2, 4, 6 of a mantissa count units below the exponents of 1024, 256, 64, 16.
template <int B> __device__ __forceinline__ constexpr u32 base_of(int s) {
    constexpr u32 quarters[4] = {0x6400, 0x5c00, 0x5400, 0x4c00};
    return B == 8 ? 0x6400 : B >= 4 ? (s % 2 ? 0x5400 : 0x6400) : quarters[s];
}
template <int B> __device__ __forceinline__ constexpr int place_of(int s) {
    return B == 8 ? 0 : B >= 4 ? 4 * (s % 2) : 2 * s;
}
// Base and zero point, exact in fp16.
template <int B> __device__ __forceinline__ constexpr u32 zero_of(int s) {
    return twice(base_of<B>(s) + ((1u << (B - 1)) << place_of<B>(s)));
}

// How far the upper bits of fragment f's register s lie to the left of where they are used.
template <int B> __device__ __forceinline__ constexpr int turn_of(int f, int s) {
    if (B == 6) return 8 * (f % 2) + 2 * (s / 2);
    return 8 * (f / 2) + (B == 5 ? 2 * (f % 2) + s / 2 : f % 2);
}

template <int B> __device__ __forceinline__ void fragment(const u32* w, int f, u32* a) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const u32 base = twice(base_of<B>(s));
        const int place = place_of<B>(s);
        if constexpr (B == 8) {
            a[s] = __byte_perm(w[2 * f + s / 2], base, s % 2 ? 0x5351 : 0x5250);
        } else if constexpr (B >= 4) {
            a[s] = pick(s < 2 ? w[f] : w[f] >> 8, twice(0xf << place), base);
            if constexpr (B == 5)
                a[s] = pick(turned(w[4], turn_of<B>(f, s)), twice(0x10 << place), a[s]);
            if constexpr (B == 6)
                a[s] = pick(turned(w[4 + f / 2], turn_of<B>(f, s)), twice(0x30 << place), a[s]);
        } else {
            a[s] = pick(f % 2 ? w[f / 2] >> 8 : w[f / 2], twice(3 << place), base);
            if constexpr (B == 3)
                a[s] = pick(turned(w[2], turn_of<B>(f, s)), twice(4 << place), a[s]);
        }
    }
}

template <int B> __device__ __forceinline__ void read_words(const byte* stage, int lane, u32* w) {
    int n = 0;
    const byte* at = stage;
    if constexpr (B >= 4) {
        const uint4 v = *(const uint4*)(at + lane * 16);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        n = 4, at += 512;
    }
    if constexpr (B == 8) {
        const uint4 v = *(const uint4*)(at + lane * 16);
        w[4] = v.x, w[5] = v.y, w[6] = v.z, w[7] = v.w;
    }
    if constexpr ((B & 2) != 0) {
        const uint2 v = *(const uint2*)(at + lane * 8);
        w[n] = v.x, w[n + 1] = v.y;
        n += 2, at += 256;
    }
    if constexpr ((B & 1) != 0) w[n] = *(const u32*)(at + lane * 4);
}

// Scales of a lane's columns g, 8 + g, 16 + g, 24 + g; for GPTQ, also their zeros.
struct Scales {
    float scale[4], zero[4];
};

template <bool GPTQ> __device__ __forceinline__ Scales scales_of(const byte* at, int g) {
    Scales own;
    if constexpr (GPTQ) {
        const uint4 v = ((const uint4*)at)[g];
        const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            own.scale[i] = from_half(w[i / 2] >> (16 * (i % 2)));
            own.zero[i] = from_half(w[2 + i / 2] >> (16 * (i % 2)));
        }
    } else {  // RN16(level² · unit), like decoder_scale
        const u32 w = ((const u32*)at)[g], unit = __byte_perm(w, 0, 0x3232);
        const u32 spread = __byte_perm(w, 0, 0x4140);  // codes 0, 1 | 2, 3
        const u32 low = less(pick(spread, 0x000f000fu, 0x64006400u), 0x63fe63feu);
        const u32 high = less(pick(spread, 0x00f000f0u, 0x54005400u), 0x53e053e0u);
        const u32 even = times(times(low, low), unit), odd = times(times(high, high), unit);
        own.scale[0] = from_half(even), own.scale[1] = from_half(odd);
        own.scale[2] = from_half(even >> 16), own.scale[3] = from_half(odd >> 16);
    }
    return own;
}

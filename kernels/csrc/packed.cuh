// The layout of matrices on the GPU at inference: tiles of 32 columns, panels of 32 rows with codes
// in the places of an mma's operand. packed.py writes it, docs/concepts/decoding.md
// draws it.
#ifndef PACKED  // both ways to multiply include it
#define PACKED
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
__device__ __forceinline__ constexpr u32 twice(u32 a) { return a | a << 16; }

__device__ __forceinline__ void pairs_of(const uint4& v, float* x) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = from_half(w[i / 2] >> (16 * (i % 2)));
}

// RN16(x · size) · weight, 8 numbers.
__device__ __forceinline__ uint4 normed(const uint4& v, float size, const uint4& weights,
                                        float mean = 0.0f) {
    float x[8];
    pairs_of(v, x);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] -= mean;
    return {times(halves(x[0] * size, x[1] * size), weights.x),
            times(halves(x[2] * size, x[3] * size), weights.y),
            times(halves(x[4] * size, x[5] * size), weights.z),
            times(halves(x[6] * size, x[7] * size), weights.w)};
}

__device__ __forceinline__ void mma(float* d, const u32* a, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D += A B for bytes, those of B signed: 16 columns x 32 rows, 32 rows x 8.
#define MMA_OF_BYTES(NAME, FORM)                                                                   \
    __device__ __forceinline__ void NAME(int* d, const u32* a, u32 b0, u32 b1) {                   \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." FORM ".s8.s32 "                               \
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                \
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                       \
    }
MMA_OF_BYTES(mma_signed, "s8")
MMA_OF_BYTES(mma_unsigned, "u8")

// A lane's operands of two mma: register 4 m + 2 h + j has column c = 2 m + j, rows 8 t + 4 h to
// 8 t + 4 h + 3, a byte each. Codes lie in the upper bits of a byte, those of up to 4 columns in
// one; the last one has the zero point taken off, which inverts its highest bit.
template <int B> __device__ __forceinline__ constexpr int columns_of_byte() {
    return B == 2 ? 4 : B <= 4 ? 2 : 1;
}
template <int B> __device__ __forceinline__ constexpr int place_of(int c) {  // bits below its code
    return 8 - B * columns_of_byte<B>() + B * (c % columns_of_byte<B>());
}
// Whether the register of column c also has the codes of column c + 1, above its own.
template <int B> __device__ __forceinline__ constexpr bool has_next(int c) {
    return (c + 1) % columns_of_byte<B>() != 0;
}

__device__ __forceinline__ constexpr u32 each_byte(u32 mask) { return mask * 0x01010101u; }
// Bits of each byte moved to the left, in `mask`, and others.
__device__ __forceinline__ u32 raised(u32 w, int by, u32 mask, u32 others = 0) {
    return pick(w << by, each_byte(mask), others);
}

// The register that holds the codes of `operands`' register r, and maybe others, at `place_of`.
template <int B> __device__ __forceinline__ u32 holder(const u32* w, int r) {
    if constexpr (B == 8) return w[r];
    if constexpr (B == 2) return w[r / 2 % 2];
    if constexpr (B == 6) {
        if (r < 6) return w[r];
        const u32* of = w + 3 * (r - 6);
        return raised(of[0], 6, 0xc0, raised(of[1], 4, 0x30, raised(of[2], 2, 0x0c)));
    }
    if constexpr (B == 5) {
        if (r < 5) return w[r];
        const u32 of = r == 5 ? w[0] : r == 6 ? w[2] : w[4];
        if (r < 7) return raised(of, 5, 0xe0, raised(w[r == 5 ? 1 : 3], 3, 0x18));
        return raised(of, 5, 0xe0, raised(w[1], 2, 0x10, raised(w[3], 1, 0x08)));
    }
    if constexpr (B == 3)
        if (r >= 6) return raised(w[0], 6, 0xc0, raised(w[1], 4, 0x30, raised(w[2], 2, 0x0c)));
    return w[r / 2];
}

template <int B> __device__ __forceinline__ void operands(const u32* w, u32* a) {
    const u32 last = B == 3 ? holder<B>(w, 7) : 0;  // once for two registers
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        if (B > 4 && r >= B) continue;
        const int place = place_of<B>(r / 4 * 2 + r % 2);
        const u32 held = B == 3 && r >= 6 ? last : holder<B>(w, r);
        a[r] = place ? held & each_byte(0xff << place & 0xff) : held;
    }
    if constexpr (B == 5) a[5] = holder<B>(w, 5);
    if constexpr (B == 5 || B == 6) a[6] = holder<B>(w, 6), a[7] = holder<B>(w, 7);
}

// The codes in register r of `operands`, 4 bytes.
template <int B> __device__ __forceinline__ u32 codes_of(const u32* a, int r) {
    const int c = r / 4 * 2 + r % 2, next = r % 2 ? r + 3 : r + 1;
    return (a[r] ^ (has_next<B>(c) ? a[next] : each_byte(128))) >> place_of<B>(c);
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

// Scales of columns g and 16 + g, 8 + g and 24 + g: RN16(level² · unit), like decoder_scale.
__device__ __forceinline__ void scale_pairs(const byte* at, int g, u32& even, u32& odd) {
    const u32 w = ((const u32*)at)[g], unit = __byte_perm(w, 0, 0x3232);
    const u32 spread = __byte_perm(w, 0, 0x4140);  // codes 0, 1 | 2, 3
    const u32 low = less(pick(spread, 0x000f000fu, 0x64006400u), 0x63fe63feu);
    const u32 high = less(pick(spread, 0x00f000f0u, 0x54005400u), 0x53e053e0u);
    even = times(times(low, low), unit), odd = times(times(high, high), unit);
}

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
    } else {
        u32 even, odd;
        scale_pairs(at, g, even, odd);
        own.scale[0] = from_half(even), own.scale[1] = from_half(odd);
        own.scale[2] = from_half(even >> 16), own.scale[3] = from_half(odd >> 16);
    }
    return own;
}

// CASE(bits) for the bits of a code.
#define FOR_BITS(BITS, CASE)    \
    switch (BITS) {             \
        case 2: CASE(2); break; \
        case 3: CASE(3); break; \
        case 4: CASE(4); break; \
        case 5: CASE(5); break; \
        case 6: CASE(6); break; \
        default: CASE(8);       \
    }
#endif

// Panels of packed matrices times x on tensor cores, in fp16: codes become the values that the format
// says, exactly as decode.cu writes them, and a product serves 8 rows of x.
#include "packed.cuh"

__device__ __forceinline__ u32 masked(u32 a, u32 mask, u32 other) {  // a & mask ^ other
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(a), "r"(mask), "r"(other));
    return r;
}
__device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
// The fp16 numbers 2^-n and n, the latter up to 2047.
__device__ __forceinline__ constexpr u32 power_bits(int n) { return (u32)(15 - n) << 10; }
__device__ __forceinline__ constexpr u32 integer_bits(int n) {
    int e = 0;
    while (n >> (e + 1)) ++e;
    return (u32)(15 + e) << 10 | ((u32)n << (10 - e) & 0x3ff);
}

// What a lane's columns g, 8 + g, 16 + g, 24 + g are scaled by, each twice; for GPTQ, also minus
// their zeros.
struct HalfScales {
    u32 scale[4], zero[4];
};

template <bool GPTQ> __device__ __forceinline__ HalfScales half_scales_of(const byte* at, int g) {
    HalfScales own;
    uint4 v = {};
    if constexpr (GPTQ) v = ((const uint4*)at)[g];  // adjacent columns of four
    else scale_pairs(at, g, v.x, v.y);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const u32 low = GPTQ ? c % 2 : c / 2, of = GPTQ ? c / 2 : c % 2;
        own.scale[c] = __byte_perm(of ? v.y : v.x, 0, low ? 0x3232 : 0x1010);
        own.zero[c] = __byte_perm(of ? v.w : v.z, 0, low ? 0x3232 : 0x1010) ^ 0x80008000u;
    }
    return own;
}

// A lane's 32 values as first operands of four mma, [16 columns][rows 8 t + 4 h on]: of each column
// rows 0 and 2 of the four, then 1 and 3. A code c at bit p of a byte is 1024 + 2^p c once it stands
// in an fp16 number, and 2^-p times that less 1024 · 2^-p + zero is exact.
template <int B, bool GPTQ>
__device__ __forceinline__ void values(const u32* w, const HalfScales& own, u32 (*a)[2][4]) {
    constexpr u32 ALL = (1 << B) - 1;
    constexpr int ZERO = 1 << (B - 1);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const int m = r / 4, h = r / 2 % 2, j = r % 2, c = 2 * m + j, p = place_of<B>(c);
        const u32 held = holder<B>(w, r), mask = twice(ALL << p);
        const u32 base = twice(0x6400u | (has_next<B>(c) ? 0u : (u32)ZERO << p));
        const int above = 1024 >> p;
        const u32 least = GPTQ ? fused(own.zero[c], twice(power_bits(0)),
                                       twice(0x8000u | integer_bits(above)))
                               : twice(0x8000u | integer_bits(above + ZERO));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 code = masked(i ? held >> 8 : held, mask, base);
            a[m][h][2 * i + j] = times(fused(code, twice(power_bits(p)), least), own.scale[c]);
        }
    }
}

// 8 adjacent numbers of a row of x as second operands: pairs 0 and 2, 1 and 3, 4 and 6, 5 and 7.
__device__ __forceinline__ uint4 paired(const uint4& v) {
    return {__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
            __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632)};
}

// Whether a panel's codes are multiplied as they are, and its sums scaled: of few rows that is less work
// than to scale codes. Behind x of such a panel come the sums of its 32 numbers, fp32 for each row.
template <int ROWS, bool GPTQ> constexpr bool SUMS_X = ROWS <= 16 && !GPTQ;
template <int ROWS, bool GPTQ> constexpr int PANEL_BYTES = ROWS * (SUMS_X<ROWS, GPTQ> ? 68 : 64);

// Add a panel times x of its rows to `total`. A code c at bit p of a byte is the fp16 number 2^(p - 24) c,
// which tensor cores multiply exactly; zero points are taken off by what sums begin with.
template <int B, int ROWS>
__device__ __forceinline__ void multiply_codes(const u32* w, const Scales& own, const byte* x,
                                               int lane, float (*total)[2][4]) {
    constexpr u32 ALL = (1 << B) - 1, ZERO = 1 << (B - 1);
    u32 a[2][2][4];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const int m = r / 4, h = r / 2 % 2, j = r % 2, c = 2 * m + j, p = place_of<B>(c);
        const u32 held = holder<B>(w, r), other = has_next<B>(c) ? 0 : twice(ZERO << p);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            a[m][h][2 * i + j] = masked(i ? held >> 8 : held, twice(ALL << p), other);
    }
    const float2* sums = (const float2*)(x + ROWS * 64) + lane % 4;
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        const uint4 b = ((const uint4*)(x + n * 512))[lane];
        const float2 sum = sums[n * 4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float part[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                constexpr float UNIT = 1.0f / (1 << 24);
                const float zero = -(float)(ZERO << place_of<B>(2 * m + j)) * UNIT;
                part[2 * j] = zero * sum.x, part[2 * j + 1] = zero * sum.y;
            }
            mma(part, a[m][0], b.x, b.y), mma(part, a[m][1], b.z, b.w);
#pragma unroll
            for (int i = 0; i < 4; ++i) total[n][m][i] += own.scale[2 * m + i / 2] * part[i];
        }
    }
}

// Add the panels of a step, times x of their rows, to `total`: for rows 8 n + 2 t and 8 n + 2 t + 1
// of x columns 16 m + g, then 16 m + 8 + g. x: [panel][row of x] of 64 bytes, `paired`.
template <int B, int ROWS, bool GPTQ, bool SUMMED = false>
__device__ __forceinline__ void multiply(const byte* codes, const byte* scales, const byte* x,
                                         int kind, int lane, float (*total)[2][4]) {
    constexpr int SCALE_BYTES = GPTQ ? 128 : 32;
    const int panels = kind >> 4 & 7;
#pragma unroll 1
    for (int p = 0; p < panels; ++p, x += ROWS * (SUMMED ? 68 : 64), codes += B * 128) {
        u32 w[B], a[2][2][4];
        read_words<B>(codes, lane, w);
        const byte* at = scales + (kind >> (8 + 2 * p) & 3) * SCALE_BYTES;
        if constexpr (SUMMED) {
            Scales own = scales_of<false>(at, lane / 4);
#pragma unroll
            for (int c = 0; c < 4; ++c) own.scale[c] *= (float)(1 << (24 - place_of<B>(c)));
            multiply_codes<B, ROWS>(w, own, x, lane, total);
            continue;
        }
        values<B, GPTQ>(w, half_scales_of<GPTQ>(at, lane / 4), a);
        constexpr int HELD = ROWS > 32 ? 2 : ROWS / 8;  // eights of rows in registers at a time
#pragma unroll
        for (int first = 0; first < ROWS / 8; first += HELD) {
            uint4 b[HELD];
#pragma unroll
            for (int n = 0; n < HELD; ++n) b[n] = ((const uint4*)(x + (first + n) * 512))[lane];
#pragma unroll
            for (int i = 0; i < 4 * HELD; ++i) {  // sums that follow each other are others
                const int h = i / (2 * HELD), m = i / HELD % 2, n = i % HELD;
                mma(total[first + n][m], a[m][h], h ? b[n].z : b[n].x, h ? b[n].w : b[n].y);
            }
        }
    }
}

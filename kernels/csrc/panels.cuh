// Panels of packed matrices times x on tensor cores, in integers. In each panel a row of x is 16-bit
// numbers times a size, in two planes: q = 256 high + low. Sums of a panel are exact; scaled, they are
// added in fp32.
#include "packed.cuh"

// Of a panel of a row of x: the size of a q of 1, and the sum of its 32 numbers q.
struct Unit {
    float size;
    int sum;
};

// Add the sums of a panel, columns 8 c + g of the row of x that a lane has, to `total`.
template <int B, bool GPTQ>
__device__ __forceinline__ void add_sums(const int (*sums)[4], const Scales& own, const Unit& unit,
                                         float* total) {
    int both[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        both[c] = sums[c / 2][c % 2 * 2] * 256 + sums[c / 2][c % 2 * 2 + 1];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        constexpr int ZERO = 1 << (B - 1);
        const float one = 1 << place_of<B>(c);
        int sum = has_next<B>(c) ? both[c] - both[(c + 1) % 4] : both[c];
        float value;
        if constexpr (GPTQ) {
            const float zero = has_next<B>(c) ? own.zero[c] : own.zero[c] - ZERO;
            value = (float)sum - zero * one * (float)unit.sum;
        } else {
            value = (float)(has_next<B>(c) ? sum - (unit.sum << (B - 1 + place_of<B>(c))) : sum);
        }
        total[c] += own.scale[c] * (unit.size / one) * value;
    }
}

// Add the panels of a step, times x of their rows, to `total`: for row t of x, columns
// 8 c + g. x: the step's panels, [panel][row of x][plane][32 bytes]; units: [panel][row of x].
// One row: four panels fill the operand for x, and lane t has the sums of panel t.
template <int B, int ROWS, bool GPTQ>
__device__ __forceinline__ void multiply(const byte* codes, const byte* scales, const byte* x,
                                         const Unit* units, int kind, int lane, float* total) {
    constexpr int SCALE_BYTES = GPTQ ? 128 : 32;
    const int panels = kind >> 4 & 7, g = lane / 4, t = lane % 4;
    auto scales_at = [&](int panel) {
        return scales_of<GPTQ>(scales + (kind >> (8 + 2 * panel) & 3) * SCALE_BYTES, g);
    };
    u32 w[B], a[8];
    if constexpr (ROWS == 1) {  // without a panel, codes of any kind are times 0
        constexpr int MOST = STEP / 128 / B < BLOCK_PANELS ? STEP / 128 / B : BLOCK_PANELS;
        int sums[2][4] = {};
        uint2 own = {0, 0};
        if (lane / 8 < panels) own = *(const uint2*)(x + lane * 8);
        const Unit unit = t < panels ? units[t] : Unit{0.0f, 0};
#pragma unroll
        for (int p = 0; p < MOST; ++p) {
            read_words<B>(codes + p * B * 128, lane, w);
            operands<B>(w, a);
            const u32 b0 = lane / 8 == p ? own.x : 0, b1 = lane / 8 == p ? own.y : 0;
            mma_signed(sums[0], a, b0, b1), mma_signed(sums[1], a + 4, b0, b1);
        }
        add_sums<B, GPTQ>(sums, scales_at(t), unit, total);
    } else {
#pragma unroll 1
        for (int p = 0; p < panels; ++p, x += ROWS * 64, units += ROWS, codes += B * 128) {
            read_words<B>(codes, lane, w);
            operands<B>(w, a);
            int sums[2][4] = {};
            const uint2 b = *(const uint2*)(x + lane * 8);
            mma_signed(sums[0], a, b.x, b.y), mma_signed(sums[1], a + 4, b.x, b.y);
            add_sums<B, GPTQ>(sums, scales_at(p), units[t], total);
        }
    }
}

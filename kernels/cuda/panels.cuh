// Panels of packed matrices times x on tensor cores: codes become fp16 numbers without rounding,
// and the sums of a group are scaled in fp32.
#include "packed.cuh"

template <int COUNT> __device__ __forceinline__ void clear(float (*sum)[4]) {
#pragma unroll
    for (int v = 0; v < COUNT * 4; ++v) sum[v / 4][v % 4] = 0.0f;
}

// Add the panels of a step, times x of their rows, to `total`: m-tile i and 8 rows n at 2 n + i.
// Codes are multiplied with their base; base and zero, times x, are subtracted from a group's sums.
// GROUP: panels per group, for unrolling; 0 for none.
template <int B, int NT, bool GPTQ, int GROUP>
__device__ __forceinline__ void multiply_groups(const byte* codes, const byte* scales,
                                                const half_bits* x, int stride, int panels,
                                                int group, int lane, float (*total)[4]) {
#pragma unroll 1
    for (int left = panels; left > 0; left -= group, scales += GPTQ ? 128 : 32) {
        float sum[2 * NT][4], below[NT][4], ones[NT][4];
        clear<2 * NT>(sum), clear<NT>(below), clear<NT>(ones);
        const Scales own = scales_of<GPTQ>(scales, lane / 4);
#pragma unroll (NT == 1 && GROUP ? GROUP : 1)
        for (int p = 0; p < group; ++p, codes += B * 128, x += PANEL_ROWS) {
            u32 w[B], zero[4], one[4];
            read_words<B>(codes, lane, w);
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                zero[s] = GPTQ ? twice(base_of<B>(s)) : zero_of<B>(s);
                one[s] = 0x3c003c00u;
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const uint4 b = *(const uint4*)(x + n * 8 * stride);
#pragma unroll
                for (int f = 0; f < 4; ++f) {
                    u32 a[4];
                    fragment<B>(w, f, a);
                    mma(sum[2 * n + f / 2], a, f % 2 ? b.z : b.x, f % 2 ? b.w : b.y);
                }
                mma(below[n], zero, b.x, b.y), mma(below[n], zero, b.z, b.w);
                if constexpr (GPTQ) mma(ones[n], one, b.x, b.y), mma(ones[n], one, b.z, b.w);
            }
        }
#pragma unroll
        for (int v = 0; v < NT * 8; ++v) {
            const int i = v / 4 % 2, n = v / 8, j = v % 4, c = 2 * i + j / 2;
            float value = sum[2 * n + i][j] - below[n][j];
            if constexpr (GPTQ) value -= own.zero[c] * ones[n][j];
            total[2 * n + i][j] += own.scale[c] * value;
        }
    }
}
template <int B, int NT, bool GPTQ>
__device__ __forceinline__ void multiply(const byte* codes, const byte* scales, const half_bits* x,
                                         int stride, int panels, int group, int lane,
                                         float (*total)[4]) {
    constexpr int USUAL = STEP / 128 / B < MOST_PANELS ? 2 : MOST_PANELS;
    if (group == USUAL)
        multiply_groups<B, NT, GPTQ, USUAL>(codes, scales, x, stride, panels, USUAL, lane, total);
    else multiply_groups<B, NT, GPTQ, 0>(codes, scales, x, stride, panels, group, lane, total);
}

// Matrices as they lie on the card, decoded: what is multiplied where rows are many.
#include "packed.cuh"

// A warp decodes a panel of a tile: y (columns, k), in the order of the matrix's rows. table int64
// (panels, 3): bits, place of the codes in 128 bytes, group.
template <int B, bool GPTQ>
__device__ __forceinline__ void decode_panel(const byte* codes, const Scales& own, int lane,
                                             int columns, int k, half_bits* y) {
    u32 w[B], a[4][4];
    read_words<B>(codes, lane, w);
#pragma unroll
    for (int f = 0; f < 4; ++f) fragment<B>(w, f, a[f]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // rows 8 t to 8 t + 7 of column 8 c + g
        if (8 * c + lane / 4 >= columns) continue;
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int s = 2 * (i % 2) + c % 2;
            u32 value = less(a[c / 2 * 2 + i / 2][s], GPTQ ? twice(base_of<B>(s)) : zero_of<B>(s));
            if constexpr (GPTQ) value = less(value, twice(to_half(own.zero[c])));
            pairs[i] = times(value, twice(to_half(own.scale[c])));
        }
        half_bits* to = y + (integer)(8 * c + lane / 4) * k + lane % 4 * 8;
        *(uint4*)to = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
}

template <bool GPTQ>
__device__ __forceinline__ void decode(const byte* codes, const byte* scales, const integer* table,
                                       half_bits* y, int k, int columns, int tile_bytes,
                                       int groups) {
    const int lane = threadIdx.x % 32, panel = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (panel >= k / PANEL_ROWS) return;
    table += panel * 3;
    codes += (integer)blockIdx.x * tile_bytes + table[1] * 128;
    scales += ((integer)blockIdx.x * groups + table[2]) * (GPTQ ? 128 : 32);
    const Scales own = scales_of<GPTQ>(scales, lane / 4);
    y += (integer)blockIdx.x * TILE_COLUMNS * k + panel * PANEL_ROWS;
    columns -= blockIdx.x * TILE_COLUMNS;
    switch (table[0]) {
        case 2: decode_panel<2, GPTQ>(codes, own, lane, columns, k, y); break;
        case 3: decode_panel<3, GPTQ>(codes, own, lane, columns, k, y); break;
        case 4: decode_panel<4, GPTQ>(codes, own, lane, columns, k, y); break;
        case 5: decode_panel<5, GPTQ>(codes, own, lane, columns, k, y); break;
        case 6: decode_panel<6, GPTQ>(codes, own, lane, columns, k, y); break;
        default: decode_panel<8, GPTQ>(codes, own, lane, columns, k, y);
    }
}

#define DECODE(NAME, GPTQ)                                                                        \
    extern "C" __global__ void NAME(const byte* codes, const byte* scales, const integer* table,  \
                                    half_bits* y, integer k, integer columns, integer tile_bytes, \
                                    integer groups) {                                             \
        decode<GPTQ>(codes, scales, table, y, k, columns, tile_bytes, groups);                    \
    }
DECODE(decode_exl2, false)
DECODE(decode_gptq, true)

// Decode matrices from their layout on the GPU, for products with many rows.
#include "packed.cuh"

// A warp decodes one panel of a tile to shared memory, [row][32 columns]. Pieces of 8 columns are
// permuted by row, so that lanes do not conflict in a bank.
template <int B, bool GPTQ>
__device__ __forceinline__ void decode_panel(const byte* codes, const Scales& own, int lane,
                                             half_bits (*rows)[TILE_COLUMNS]) {
    u32 w[B], a[8];
    read_words<B>(codes, lane, w);
    operands<B>(w, a);
    const int t = lane % 4;
    constexpr u32 zero = GPTQ ? 0x6400 : 0x6400 + (1 << (B - 1));
#pragma unroll
    for (int r = 0; r < 8; ++r) {  // rows 8 t + 4 h to 8 t + 4 h + 3 of column 8 c + g
        const int c = r / 4 * 2 + r % 2, h = r / 2 % 2;
        const u32 four = codes_of<B>(a, r);
        half_bits* to = &rows[8 * t + 4 * h][(c ^ t) * 8 + lane / 4];
#pragma unroll
        for (int i = 0; i < 2; ++i, to += 2 * TILE_COLUMNS) {
            u32 value = less(__byte_perm(four, 0x64646464, i ? 0x4342 : 0x4140), twice(zero));
            if constexpr (GPTQ) value = less(value, twice(to_half(own.zero[c])));
            value = times(value, twice(to_half(own.scale[c])));
            to[0] = (half_bits)value;
            to[TILE_COLUMNS] = (half_bits)(value >> 16);
        }
    }
}

template <bool GPTQ>
__device__ __forceinline__ void decode(const byte* codes, const byte* scales, const integer* table,
                                       const integer* order, half_bits* y, int panels, int tiles,
                                       integer tile_bytes, int groups) {
    __shared__ __align__(16) half_bits shared[DECODE_WARPS][PANEL_ROWS][TILE_COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, panel = blockIdx.y;
    const int tile = blockIdx.x * DECODE_WARPS + warp;
    if (tile >= tiles) return;
    table += panel * 3, order += panel * PANEL_ROWS;
    codes += tile * tile_bytes + table[1] * 128;
    scales += ((integer)tile * groups + table[2]) * (GPTQ ? 128 : 32);
    const Scales own = scales_of<GPTQ>(scales, lane / 4);
    integer to[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = order[8 * i + lane / 4];
    half_bits(*rows)[TILE_COLUMNS] = shared[warp];
    switch (table[0]) {
        case 2: decode_panel<2, GPTQ>(codes, own, lane, rows); break;
        case 3: decode_panel<3, GPTQ>(codes, own, lane, rows); break;
        case 4: decode_panel<4, GPTQ>(codes, own, lane, rows); break;
        case 5: decode_panel<5, GPTQ>(codes, own, lane, rows); break;
        case 6: decode_panel<6, GPTQ>(codes, own, lane, rows); break;
        default: decode_panel<8, GPTQ>(codes, own, lane, rows);
    }
    __syncwarp();
    y += tile * TILE_COLUMNS + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        *(uint4*)(y + to[i] * tiles * TILE_COLUMNS) =
            *(const uint4*)&rows[8 * i + lane / 4][(lane % 4 ^ i) * 8];
}

// y (panels · 32, tiles · 32), rows permuted by `order`; table int64 (panels, 3): bits, offset of
// the codes in 128 bytes, group. Grid (tiles / warps, panels): a CTA has adjacent tiles.
#define DECODE(NAME, GPTQ)                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS)                                \
        NAME(const byte* codes, const byte* scales, const integer* table, const integer* order,    \
             half_bits* y, integer panels, integer tiles, integer tile_bytes, integer groups) {    \
        decode<GPTQ>(codes, scales, table, order, y, panels, tiles, tile_bytes, groups);           \
    }
DECODE(decode_exl2, false)
DECODE(decode_gptq, true)

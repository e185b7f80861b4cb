// Lay out a file's matrices as packed.cuh reads them. A warp lays out one panel of a tile: grid
// (tiles, panels / warps). Columns beyond n are 0. Twins: lay_out, lay_out_scales in reference/ops.py.
#include "packed.cuh"

typedef unsigned long long u64;

// The codes of rows 8 t to 8 t + 7 of a panel in a column, from bit 0 on.
template <int B>
__device__ __forceinline__ u64 eight(const u32* panel, integer n, int t) {
    const int begin = 8 * B * t, shift = begin % 32;
    panel += begin / 32 * n;
    u64 found = panel[0];
    if (shift + 8 * B > 32) found |= (u64)panel[n] << 32;
    return found >> shift;
}

// The 4-bit codes of rows at any places in a column.
__device__ __forceinline__ u64 eight_of(const u32* column, integer n, const integer* rows) {
    u64 found = 0;
    for (int i = 0; i < 8; ++i) {
        const u32 word = column[rows[i] / 8 * n];
        found |= (u64)(word >> (4 * (int)(rows[i] % 8)) & 15) << (4 * i);
    }
    return found;
}

// Bits of each byte, moved to the right: inverts `raised`.
__device__ __forceinline__ u32 lowered(u32 w, int by, u32 mask) {
    return (w & each_byte(mask)) >> by;
}

// A lane's words of a panel, from the codes of its 4 columns: `places` in packed.py.
template <int B> __device__ __forceinline__ void arrange(const u64* columns, u32* w) {
    u32 a[8] = {};  // registers, or one for all that share bytes
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const int c = r / 4 * 2 + r % 2, h = r / 2 % 2;
        u32 codes = has_next<B>(c) ? 0 : each_byte(1 << (B - 1));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            codes ^= ((u32)(columns[c] >> (B * (4 * h + i))) & ((1u << B) - 1)) << (8 * i);
        a[B > 4 ? r : B == 2 ? h : r / 2] |= codes << place_of<B>(c);
    }
#pragma unroll
    for (int i = 0; i < B; ++i) w[i] = a[i];
    if constexpr (B == 5) {
        w[0] |= lowered(a[5], 5, 0xe0), w[1] |= lowered(a[5], 3, 0x18);
        w[2] |= lowered(a[6], 5, 0xe0), w[3] |= lowered(a[6], 3, 0x18);
        w[4] |= lowered(a[7], 5, 0xe0), w[1] |= lowered(a[7], 2, 0x10);
        w[3] |= lowered(a[7], 1, 0x08);
    }
    if constexpr (B == 3 || B == 6)
#pragma unroll
        for (int i = 0; i < B / 3; ++i) {
            u32* of = w + 3 * i;
            const u32 spread = a[B + i];
            of[0] |= lowered(spread, 6, 0xc0);
            of[1] |= lowered(spread, 4, 0x30);
            of[2] |= lowered(spread, 2, 0x0c);
        }
}

// Inverts read_words.
template <int B> __device__ __forceinline__ void write_words(byte* at, int lane, const u32* w) {
    int n = 0;
    if constexpr (B >= 4) {
        ((uint4*)at)[lane] = {w[0], w[1], w[2], w[3]};
        n = 4, at += 512;
    }
    if constexpr (B == 8) ((uint4*)at)[lane] = {w[4], w[5], w[6], w[7]};
    if constexpr ((B & 2) != 0) {
        ((uint2*)at)[lane] = {w[n], w[n + 1]};
        n += 2, at += 256;
    }
    if constexpr ((B & 1) != 0) ((u32*)at)[lane] = w[n];
}

// panel: its first word in column 0; rows: the places of the panel's rows, if they lie anywhere,
// else 0; if they do, panel is the first word of all.
template <int B>
__device__ __forceinline__ void lay_panel(const u32* panel, const integer* rows, byte* to,
                                          integer n) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    u64 columns[4];
    u32 w[B];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const integer column = (integer)blockIdx.x * TILE_COLUMNS + 8 * i + lane / 4;
        if (column >= n)
            columns[i] = 0;
        else if (B == 4 && rows)
            columns[i] = eight_of(panel + column, n, rows + 8 * t);
        else
            columns[i] = eight<B>(panel + column, n, t);
    }
    arrange<B>(columns, w);
    write_words<B>(to, lane, w);
}

// packed (words, n), table int64 (panels, 4): see laid_table in packing.py; order int64 (k,) or 0,
// for one group of 4 bits -> the codes of `words`, tile_bytes per tile
extern "C" __global__ void lay_out(const u32* packed, const integer* table, const integer* order,
                                   byte* words, integer n, integer panels, integer tile_bytes) {
    const integer panel = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (panel >= panels) return;
    table += panel * 4;
    words += blockIdx.x * tile_bytes + table[2];
    if (order)
        order += panel * PANEL_ROWS;
    else
        packed += table[1] * n;
#define CASE(B) lay_panel<B>(packed, order, words, n)
    FOR_BITS(table[0], CASE)
}

// codes (groups, words) of 4 bits, maxima fp16 (groups,) -> scales (tiles, groups, 8): count words
extern "C" __global__ void lay_out_scales(const u32* codes, const half_bits* maxima, u32* scales,
                                          integer groups, integer words, integer count) {
    const integer index = grid_thread();
    if (index >= count) return;
    const integer group = index / 8 % groups, first = index / 8 / groups * 4;
    u32 found = (u32)to_half(from_half(maxima[group]) / (SCALE_LEVELS * SCALE_LEVELS)) << 16;
    for (int i = 0; i < 4 && first + i < words; ++i)
        found |= (codes[group * words + first + i] >> (4 * (index % 8)) & 15) << (4 * i);
    scales[index] = found;
}

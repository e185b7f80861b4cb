// Decode matrices from their layout on the GPU, for products with many rows.
#include "packed.cuh"
#include "early.cuh"

// Where a lane's row of 8 columns is in a panel that a warp decodes to shared memory, [row][32
// columns]. Pieces of 8 columns are permuted by row, so that lanes do not conflict in a bank.
__device__ __forceinline__ int panel_place(int row, int piece) {
    return row * TILE_COLUMNS + (piece ^ row / 8) * 8;
}

// Store four 8 x 8 blocks: register i of lane 4 g + t has rows 8 t + 2 i, 8 t + 2 i + 1 of column g
// of a piece.
__device__ __forceinline__ void store_piece(half_bits* panel, int piece, int lane, const u32* a) {
#if __CUDA_ARCH__ >= 900
    // lane 8 i + r names the place of row r of block i
    const int row = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    const u32 to = (u32)__cvta_generic_to_shared(panel + panel_place(row, piece));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
#else
    half_bits* to = panel + panel_place(lane % 4 * 8, piece) + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i * TILE_COLUMNS] = (half_bits)a[i];
        to[(2 * i + 1) * TILE_COLUMNS] = (half_bits)(a[i] >> 16);
    }
#endif
}

template <int B, bool GPTQ>
__device__ __forceinline__ void decode_panel(const u32* w, const Scales& own, int lane,
                                             half_bits* panel) {
    u32 a[8];
    operands<B>(w, a);
    constexpr u32 zero = GPTQ ? 0x6400 : 0x6400 + (1 << (B - 1));
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // rows 8 t to 8 t + 7 of column 8 c + g
        u32 values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 four = codes_of<B>(a, c / 2 * 4 + i / 2 * 2 + c % 2);
            u32 value = less(__byte_perm(four, 0x64646464, i % 2 ? 0x4342 : 0x4140), twice(zero));
            if constexpr (GPTQ) value = less(value, twice(to_half(own.zero[c])));
            values[i] = times(value, twice(to_half(own.scale[c])));
        }
        store_piece(panel, c, lane, values);
    }
}

struct Tiles {  // of a panel: the first one of a warp, and how many bytes further the next ones lie
    const byte *codes, *scales;
    integer step;
};

// Decode `count` tiles of a panel, and write them to 4 rows of y, 16 bytes by a lane; the next
// tile's codes are on their way meanwhile.
template <int B, bool GPTQ>
__device__ __forceinline__ void decode_tiles(Tiles from, int count, int lane, half_bits* panel,
                                             half_bits* const* y) {
    u32 w[B];
    read_words<B>(from.codes, lane, w);
    Scales own = scales_of<GPTQ>(from.scales, lane / 4);
#pragma unroll
    for (int j = 0; j < DECODE_TILES; ++j) {
        if (j >= count) return;
        decode_panel<B, GPTQ>(w, own, lane, panel);
        if (j == 0) wait_for_input();  // which may still read what y was
        if (j + 1 < count) {
            from.codes += from.step, from.scales += from.step;
            read_words<B>(from.codes, lane, w);
            own = scales_of<GPTQ>(from.scales, lane / 4);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *(uint4*)(y[i] + j * DECODE_WARPS * TILE_COLUMNS) =
                *(const uint4*)(panel + panel_place(8 * i + lane / 4, lane % 4));
        __syncwarp();
    }
}

struct Part {  // a matrix: see PackedMatrix
    const byte* words;
    const integer *table, *order;  // table (panels, 4): see laid_table in packing.py
    integer tile_bytes;
    int tiles, column, first;  // where it begins in y, and its first CTA in a row of them
};
struct Work {
    Part of[MOST_MATRICES];
    half_bits* y;  // (panels · 32, columns), rows a `step` apart, permuted by `order`
    integer step;
    int count;  // of matrices
};

template <bool GPTQ> __device__ __forceinline__ void decode(const Work& work) {
    __shared__ __align__(16) half_bits shared[DECODE_WARPS][PANEL_ROWS * TILE_COLUMNS];
    int index = 0;
    while (index + 1 < work.count && blockIdx.x >= work.of[index + 1].first) ++index;
    const Part& part = work.of[index];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = (blockIdx.x - part.first) * DECODE_WARPS * DECODE_TILES + warp;
    const int count = (part.tiles - tile + DECODE_WARPS - 1) / DECODE_WARPS;
    if (tile >= part.tiles) return;
    const integer *panel = part.table + blockIdx.y * 4, *order = part.order + blockIdx.y * PANEL_ROWS;
    const byte* words = part.words + tile * part.tile_bytes;
    const Tiles from = {words + panel[2], words + panel[3], DECODE_WARPS * part.tile_bytes};
    half_bits* to[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to[i] = work.y + order[8 * i + lane / 4] * work.step + part.column +
                tile * TILE_COLUMNS + lane % 4 * 8;
    half_bits* room = shared[warp];
#define CASE(B) decode_tiles<B, GPTQ>(from, count, lane, room, to)
    FOR_BITS(panel[0], CASE)
}

// Grid (CTAs of all matrices, panels): a CTA has adjacent tiles, the warps' in turn.
#define DECODE(NAME, GPTQ)                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS)                                \
        NAME(const __grid_constant__ Work work) {                                                  \
        decode<GPTQ>(work);                                                                        \
    }
DECODE(decode_exl2, false)
DECODE(decode_gptq, true)

// y = x Q for 1 to 16 rows on tensor cores: codes become fp16 numbers without rounding, and sums of
// a group are scaled in fp32. docs/concepts/decoding.md tells who computes what.
#include "packed.cuh"

struct Matrix {
    const byte* codes;    // [tile] of `tile_bytes`: of each panel bits · 128 bytes
    const byte* scales;   // [tile][group][8 lanes]: 4 codes and the unit; GPTQ: 4 scales, 4 zeros
    const int4* steps;    // see Step; those of a warp in a row
    const int* bounds;    // [part][warps of the rows + 1], into `steps`
    const half_bits* x;   // (rows, k), in the order of the matrix's rows
    half_bits* y;         // (rows, columns)
    float* partial;       // [tiles of a CTA][part][rows · columns of a CTA]
    int* arrived;         // [tiles of a CTA][warp], zero before and after
    int k, rows, columns, tiles, tile_bytes, groups, tiles_each, length;  // panels of a part
    int first_cta;
};

struct Matrices {  // that are multiplied with the same x
    Matrix of[MOST_MATRICES];
};

// Panels that share bits, in groups of equal length: where codes and scales lie, bytes in a tile;
// the row of x. kind: bits | panels << 4 | those of a group << 8 | 16 bytes of codes << 12,
// of scales << 20
struct Step {
    int codes, scales, row, kind;
};

__device__ __forceinline__ void copy_async(u32 to, const byte* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait_stages() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

template <int COUNT> __device__ __forceinline__ void clear(float (*sum)[4]) {
#pragma unroll
    for (int v = 0; v < COUNT * 4; ++v) sum[v / 4][v % 4] = 0.0f;
}

// Add panels of a step, times x of their rows, to `total`: m-tile i and 8 rows n at 2 n + i. Codes
// are multiplied with their base; base and zero times x are taken off the sums of a group.
template <int B, int NT, bool GPTQ>
__device__ __forceinline__ void multiply(const byte* codes, const byte* scales, const half_bits* x,
                                         int stride, int panels, int group, int lane,
                                         float (*total)[4]) {
#pragma unroll 1
    for (int left = panels; left > 0; left -= group, scales += GPTQ ? 128 : 32) {
        float sum[2 * NT][4], below[NT][4], ones[NT][4];
        clear<2 * NT>(sum), clear<NT>(below), clear<NT>(ones);
        const Scales own = scales_of<GPTQ>(scales, lane / 4);
#pragma unroll (NT == 1 ? 4 : 1)
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

// Tell whether this warp is the last of `parts` CTAs that have stored their sums of a tile.
__device__ __forceinline__ bool is_last(int* arrived, int parts) {
    __threadfence();
    __syncwarp();
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const int before = __shfl_sync(~0u, is_first_lane ? atomicAdd(arrived, 1) : 0, 0);
    if (before < parts - 1) return false;
    __threadfence();
    if (is_first_lane) *arrived = 0;
    return true;
}

// A CTA has CTA_WARPS / KW tiles side by side, whose rows KW warps divide; blockIdx.y is a part of
// the rows.
template <int NT, int KW, int STAGES, bool GPTQ>
__device__ __forceinline__ void product(const Matrices& matrices) {
    constexpr int CW = CTA_WARPS / KW, COLUMNS = CW * TILE_COLUMNS, SCALE_BYTES = GPTQ ? 128 : 32;
    constexpr int SLOT = STEP + MOST_PANELS * SCALE_BYTES;
    extern __shared__ __align__(128) byte shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int column_warp = warp % CW, row_warp = warp / CW, part = blockIdx.y, parts = gridDim.y;
    int which = 0;
    while (which + 1 < MOST_MATRICES && (int)blockIdx.x >= matrices.of[which + 1].first_cta)
        ++which;
    const Matrix& m = matrices.of[which];
    const int first = (blockIdx.x - m.first_cta) * m.tiles_each;
    const int stop = min(first + m.tiles_each, (m.tiles + CW - 1) / CW);

    byte* ring = shared + warp * STAGES * SLOT;
    Step* steps = (Step*)(shared + CTA_WARPS * STAGES * SLOT) + row_warp * MOST_STEPS;
    float* sums = (float*)(shared + CTA_WARPS * STAGES * SLOT + KW * MOST_STEPS * sizeof(Step));
    const int kept = KW * min(m.rows, 8) * COLUMNS;  // floats; two of these, taken in turn
    half_bits* xs = (half_bits*)(sums + 2 * kept);
    const int stride = m.length * PANEL_ROWS + (m.length % 2 ? 0 : 32);  // 16 banks apart
    const int* bounds = m.bounds + part * (KW + 1) + row_warp;
    const int count = bounds[1] - bounds[0];
    for (int i = lane; i < count; i += 32) steps[i] = ((const Step*)m.steps)[bounds[0] + i];
    __syncwarp();

    const u32 ring_at = (u32)__cvta_generic_to_shared(ring) + lane * 16;
    const byte* codes_at = m.codes + (integer)(first * CW + column_warp) * m.tile_bytes + lane * 16;
    const byte* scales_at =
        m.scales + (integer)(first * CW + column_warp) * m.groups * SCALE_BYTES + lane * 16;
    int next_step = 0, next_tile = first;
    auto fetch_next = [&](int stage) {
        if (next_tile < stop && count) {
            const Step step = steps[next_step];
            const u32 to = ring_at + stage * SLOT;
            const int chunks = step.kind >> 12 & 0xff, scale_chunks = step.kind >> 20;
            if (CW == 1 || next_tile * CW + column_warp < m.tiles) {
#pragma unroll
                for (int i = 0; i < STEP / 512; ++i)
                    if (lane + 32 * i < chunks)
                        copy_async(to + 512 * i, codes_at + step.codes + 512 * i);
                if (lane < scale_chunks) copy_async(to + STEP, scales_at + step.scales);
            }
            if (++next_step == count) {
                next_step = 0, ++next_tile;
                codes_at += (integer)m.tile_bytes * CW, scales_at += m.groups * SCALE_BYTES * CW;
            }
        }
        end_stage();
    };
    for (int s = 0; s < STAGES - 1; ++s) fetch_next(s);
    const int chunks = min(m.length * PANEL_ROWS, m.k - part * m.length * PANEL_ROWS) / 8;
    for (int r = 0; r < m.rows; ++r)
        for (int c = threadIdx.x; c < chunks; c += 32 * CTA_WARPS)
            *(uint4*)(xs + r * stride + c * 8) =
                ((const uint4*)(m.x + (integer)r * m.k + part * m.length * PANEL_ROWS))[c];
    __syncthreads();

    const half_bits* own_x = xs + (NT > 1 ? g : min(g, m.rows - 1)) * stride + t * 8;
    int stage = 0, turn = 0;
    for (int tile = first; tile < stop; ++tile) {
        float total[2 * NT][4];
        clear<2 * NT>(total);
        for (int i = 0; i < count; ++i) {
            wait_stages<STAGES - 2>();
            __syncwarp();
            fetch_next(stage ? stage - 1 : STAGES - 1);
            const int kind = steps[i].kind, panels = kind >> 4 & 15, group = kind >> 8 & 15;
            const byte *codes = ring + stage * SLOT, *scales = codes + STEP;
            const half_bits* x = own_x + steps[i].row;
            if constexpr (GPTQ) {
                multiply<4, NT, true>(codes, scales, x, stride, panels, group, lane, total);
            } else {
#define CASE(B) multiply<B, NT, false>(codes, scales, x, stride, panels, group, lane, total)
                switch (kind & 15) {
                    case 2: CASE(2); break;
                    case 3: CASE(3); break;
                    case 4: CASE(4); break;
                    case 5: CASE(5); break;
                    case 6: CASE(6); break;
                    default: CASE(8);
                }
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }

        // a warp adds up, and writes, 32 columns of a row; where the duty begins goes round
        float* stored = m.partial + (integer)tile * parts * NT * 8 * COLUMNS;
        const int own = (warp + tile) % CTA_WARPS;
        auto write = [&](int unit, int n, float value) {
            const int column = tile * COLUMNS + unit % CW * TILE_COLUMNS + lane;
            if (column < m.columns)
                m.y[(integer)(8 * n + unit / CW) * m.columns + column] = to_half(value);
        };
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int rows = min(8, m.rows - 8 * n);
            float* room = sums + (turn ^= 1) * kept;
#pragma unroll
            for (int v = 0; v < 8; ++v) {
                const int r = 2 * t + v % 2, c = column_warp * TILE_COLUMNS + 8 * (v / 2) + g;
                if (r < rows)
                    room[(row_warp * rows + r) * COLUMNS + c] = total[2 * n + v / 4][v % 4];
            }
            __syncthreads();
            for (int unit = own; unit < rows * CW; unit += CTA_WARPS) {
                const int place = unit * TILE_COLUMNS + lane;
                float value = 0.0f;
#pragma unroll
                for (int w = 0; w < KW; ++w) value += room[w * rows * COLUMNS + place];
                if (parts == 1) write(unit, n, value);
                else __stcg(stored + (part * NT + n) * 8 * COLUMNS + place, value);
            }
        }
        if (parts == 1 || own >= min(8, m.rows) * CW) continue;
        if (!is_last(m.arrived + tile * CTA_WARPS + warp, parts)) continue;
        for (int n = 0; n < NT; ++n)
            for (int unit = own; unit < min(8, m.rows - 8 * n) * CW; unit += CTA_WARPS) {
                float value = 0.0f;
                for (int q = 0; q < parts; ++q)
                    value += __ldcg(stored + (q * NT + n) * 8 * COLUMNS +
                                    unit * TILE_COLUMNS + lane);
                write(unit, n, value);
            }
    }
}

#define PRODUCT(NAME, NT, KW, STAGES, GPTQ)                                                       \
    extern "C" __global__ void __launch_bounds__(32 * CTA_WARPS, 1) NAME(                         \
        const __grid_constant__ Matrices matrices) {                                              \
        product<NT, KW, STAGES, GPTQ>(matrices);                                                  \
    }
PRODUCT(exl2_8_2, 1, 16, 2, false)   // up to 8 rows, 2 stages
PRODUCT(exl2_8_3, 1, 16, 3, false)
PRODUCT(exl2_16_3, 2, 4, 3, false)
PRODUCT(gptq_8_2, 1, 16, 2, true)
PRODUCT(gptq_8_3, 1, 16, 3, true)
PRODUCT(gptq_16_3, 2, 4, 3, true)

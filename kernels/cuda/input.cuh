// Load x, for a part of the rows of the matrices and in their order, to shared memory, and turn each
// panel of a row into 16-bit numbers with a unit. With a norm, x is RN16(RN16(x · size) · weight).
// Before that, one row of x may be a result whose norm is added to hidden states.

constexpr int X_PIECES = 3;  // of a row that is a result, 8 numbers each, that a thread holds
constexpr float MOST_X = 32512.0f;  // the largest 16-bit number: its upper byte is still signed

// Where 8 numbers of a row are in shared memory: piece c of a part.
template <int ROWS> __device__ __forceinline__ byte* piece_of(byte* xs, int row, int c) {
    return xs + (c / 4 * ROWS + row) * 64 + c % 4 * 16;
}

// Move 8 numbers of a row that are not yet in order to their places.
template <int ROWS>
__device__ __forceinline__ void scatter(const uint4& v, const int4* places, int first, int count,
                                        byte* xs, int row) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    const int to[8] = {places[0].x, places[0].y, places[0].z, places[0].w,
                       places[1].x, places[1].y, places[1].z, places[1].w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const int at = to[e] - first;
        if (at >= 0 && at < count)
            ((half_bits*)piece_of<ROWS>(xs, row, at / 8))[at % 8] =
                (half_bits)(pairs[e / 2] >> (16 * (e % 2)));
    }
}

// Set the sizes of rows from the sums of the warps.
__device__ __forceinline__ void measure(float (*squares)[CTA_WARPS], int rows, int k, float eps,
                                        float* sizes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < rows) {
        float square = squares[warp][lane % CTA_WARPS];
        for (int o = CTA_WARPS / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
        if (lane == 0) sizes[warp] = rsqrtf(square / k + eps);
    }
    __syncthreads();
}

// Add the squares of 8 numbers.
__device__ __forceinline__ void add_squares(const uint4& v, float& square) {
    float x[8];
    pairs_of(v, x);
#pragma unroll
    for (int e = 0; e < 8; ++e) square += x[e] * x[e];
}

// Store a warp's sum of squares of a row.
__device__ __forceinline__ void keep(float square, float* squares) {
    for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
}

// RN16(x · size) · weight, 8 numbers.
__device__ __forceinline__ uint4 normed(const uint4& v, float size, const uint4& weights) {
    float x[8];
    pairs_of(v, x);
    return {times(halves(x[0] * size, x[1] * size), weights.x),
            times(halves(x[2] * size, x[3] * size), weights.y),
            times(halves(x[4] * size, x[5] * size), weights.z),
            times(halves(x[6] * size, x[7] * size), weights.w)};
}

// The largest magnitude of two fp16 numbers in both halves; NaN if one is.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Turn x, fp16 where its numbers will be, into numbers and units; with a norm, x is not normed yet.
template <int ROWS, class Stage>
__device__ __forceinline__ void quantize(const Stage& stage, int rows, int first, int end,
                                         const float* sizes, byte* xs, Unit* units) {
    for (int c = threadIdx.x; c / 32 * 32 < end - first; c += 32 * CTA_WARPS) {
        const bool is_there = c < end - first;
        uint4 weights;
        if (stage.norm && is_there) weights = __ldg((const uint4*)stage.norm + first + c);
#pragma unroll 1
        for (int r = 0; r < rows; ++r) {
            byte* at = piece_of<ROWS>(xs, r, c);
            uint4 v = {0, 0, 0, 0};
            if (is_there) v = *(const uint4*)at;
            if (stage.norm) v = normed(v, sizes[r], weights);
            constexpr u32 UNSIGNED = 0x7fff7fff;
            u32 most = larger(larger(v.x & UNSIGNED, v.y & UNSIGNED),
                              larger(v.z & UNSIGNED, v.w & UNSIGNED));
            most = larger(most, most >> 16 | most << 16);
            most = larger(most, __shfl_xor_sync(~0u, most, 1));
            most = larger(most, __shfl_xor_sync(~0u, most, 2));
            const float largest = from_half((half_bits)most);
            const float inverse = largest > 0.0f ? MOST_X / largest : 0.0f;
            float x[8];
            u32 q[8], planes[2][2];
            pairs_of(v, x);
#pragma unroll
            for (int e = 0; e < 8; ++e)  // q + 128, from bit 0 on
                q[e] = __float_as_uint(fmaf(x[e], inverse, 12582912.0f + 128.0f));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 low = __byte_perm(q[4 * i], q[4 * i + 1], 0x5140);
                const u32 high = __byte_perm(q[4 * i + 2], q[4 * i + 3], 0x5140);
                planes[0][i] = __byte_perm(low, high, 0x7632);
                planes[1][i] = __byte_perm(low, high, 0x5410) ^ each_byte(128);
            }
            int sums[2];
#pragma unroll
            for (int p = 0; p < 2; ++p)
                sums[p] = __dp4a((int)planes[p][0], 0x01010101, __dp4a((int)planes[p][1],
                                                                      0x01010101, 0));
            int sum = 256 * sums[0] + sums[1];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);  // after it, all have read their numbers
            if (!is_there) continue;
            byte* to = xs + (c / 4 * ROWS + r) * 64 + c % 4 * 8;
            *(uint2*)to = {planes[0][0], planes[0][1]};
            *(uint2*)(to + 32) = {planes[1][0], planes[1][1]};
            if (c % 4 == 0) units[c / 4 * ROWS + r] = {largest / MOST_X, sum};
        }
    }
}

// Put hidden states, to which the norm of a result will be added, where x will be.
template <class Stage>
__device__ __forceinline__ void load_hidden(const Stage& stage, byte* xs) {
    for (int c = threadIdx.x; c < stage.k / 8; c += 32 * CTA_WARPS) {
        uint4 v = {0, 0, 0, 0};
        int4 places[2];
        if (stage.hidden) v = __ldcg((const uint4*)stage.hidden + c);
        for (int i = 0; i < 2; ++i) places[i] = __ldg((const int4*)stage.place + 2 * c + i);
        scatter<1>(v, places, 0, stage.k, xs, 0);
    }
}

// Add RN16(RN16(x · size) · weight) · multiplier to the hidden states where x will be. Each CTA
// stores a part of the sums, in the order of in-features.
template <class Stage>
__device__ __forceinline__ void add_normed(const Stage& stage, byte* xs,
                                           float (*squares)[CTA_WARPS], float* sizes) {
    uint4 v[X_PIECES];
    const int step = 32 * CTA_WARPS, all = stage.k / 8;
    float square = 0.0f, added = 0.0f;
#pragma unroll
    for (int i = 0; i < X_PIECES; ++i) {
        const int c = threadIdx.x + i * step;
        if (c >= all) break;
        v[i] = __ldcg((const uint4*)stage.x + c);
        add_squares(v[i], square);
    }
    keep(square, squares[0]);
    __syncthreads();
    measure(squares, 1, stage.k, stage.after_eps, sizes);
#pragma unroll
    for (int i = 0; i < X_PIECES; ++i) {
        const int c = threadIdx.x + i * step;
        if (c >= all) break;
        uint4* at = (uint4*)piece_of<1>(xs, 0, c);
        const uint4 change = normed(v[i], sizes[0], __ldg((const uint4*)stage.after + c));
        float x[8], y[8];
        u32 sum[4];
        pairs_of(*at, x);
        pairs_of(change, y);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            sum[e] = halves(x[2 * e] + y[2 * e] * stage.after_multiplier,
                            x[2 * e + 1] + y[2 * e + 1] * stage.after_multiplier);
        *at = {sum[0], sum[1], sum[2], sum[3]};
        add_squares(*at, added);
        if (blockIdx.x >= stage.ctas || c % stage.ctas != blockIdx.x) continue;
        for (int e = 0; e < 8; ++e)
            stage.sum[__ldg(stage.order + 8 * c + e)] = (half_bits)(sum[e / 2] >> (16 * (e % 2)));
    }
    keep(added, squares[0]);
}

// xs: where the part's x will be, which may begin within all of it. squares: per row, the sums of the
// warps. TOGETHER: rows read at the same time.
// More than 8 rows must already be in order: reordering here costs more than a launch for it.
template <int ROWS, int TOGETHER, class Stage>
__device__ __forceinline__ void stage_x(const Stage& stage, int part, int rows, byte* all_xs,
                                        byte* xs, Unit* units, float (*squares)[CTA_WARPS]) {
    __shared__ float sizes[ROWS];
    const int all = stage.k / 8, first = part * stage.length * PANEL_ROWS / 8;  // pieces of 8
    const int end = min(all, first + stage.length * PANEL_ROWS / 8);
    const int* place = ROWS > 8 ? nullptr : stage.place;
    const bool needs_all = stage.norm || place;
    if (ROWS == 1 && stage.after) {
        add_normed(stage, all_xs, squares, sizes);
    } else {
        for (int r = 0; r < rows; r += TOGETHER) {
            float square[TOGETHER] = {};
            for (int c = threadIdx.x + (needs_all ? 0 : first); c < (needs_all ? all : end);
                 c += 32 * CTA_WARPS) {
                uint4 v[TOGETHER];
                int4 places[2];
                if (place)
                    for (int i = 0; i < 2; ++i) places[i] = __ldg((const int4*)place + 2 * c + i);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
                    if (r + i < rows)
                        v[i] = __ldcg((const uint4*)(stage.x + (integer)(r + i) * stage.k) + c);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    if (r + i >= rows) break;
                    if (place)
                        scatter<ROWS>(v[i], places, first * 8, (end - first) * 8, xs, r + i);
                    else if (c >= first && c < end)
                        *(uint4*)piece_of<ROWS>(xs, r + i, c - first) = v[i];
                    if (stage.norm) add_squares(v[i], square[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (stage.norm && r + i < rows) keep(square[i], squares[r + i]);
        }
    }
    __syncthreads();
    if (stage.norm) measure(squares, rows, stage.k, stage.eps, sizes);
    quantize<ROWS>(stage, rows, first, end, sizes, xs, units);
    __syncthreads();
}

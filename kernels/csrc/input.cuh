// Load x, for a part of the rows of the matrices and in their order, to shared memory, and turn each
// panel of a row into 16-bit numbers with a unit. With a norm, its weights multiply x here and its
// size multiplies the results. One row may be a result whose norm is added to hidden states.

constexpr float MOST_X = 32512.0f;  // the largest 16-bit number: its upper byte is still signed
constexpr float LEAST_X = 1e-30f;   // less is nothing

// Whether x may be a result whose norm is added to hidden states.
template <int ROWS> constexpr bool ADDS = ROWS == 1;

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

// Return the size of a row, 1 / sqrt(mean square + eps), from the sums of the warps.
__device__ __forceinline__ float size_of(const float* squares, int k, float eps) {
    float square = squares[threadIdx.x % CTA_WARPS];
    for (int o = CTA_WARPS / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
    return rsqrtf(square / k + eps);
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
    square = sum_of_warp(square);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
}

// Read piece c of the rows of x.
template <int ROWS, class Stage>
__device__ __forceinline__ void read_rows(const Stage& stage, int rows, int c, uint4* v) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (r < rows) v[r] = __ldcg((const uint4*)(stage.x + (integer)r * stage.k) + c);
}

// Turn 8 numbers into 16-bit numbers of their panel, whose other 24 three adjacent lanes have.
__device__ __forceinline__ Unit quantize(const float* x, u32 (*planes)[2]) {
    u32 most = 0;  // as integers, so that NaN is the largest
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const float largest = __uint_as_float(most);
    const float inverse = largest > LEAST_X ? __fdividef(MOST_X, largest) : 0.0f;
    u32 q[8];
#pragma unroll
    for (int e = 0; e < 8; ++e)  // q + 128, from bit 0 on
        q[e] = __float_as_uint(fmaf(x[e], inverse, 12582912.0f + 128.0f));
    int sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 low = __byte_perm(q[4 * i], q[4 * i + 1], 0x5140);
        const u32 high = __byte_perm(q[4 * i + 2], q[4 * i + 3], 0x5140);
        planes[0][i] = __byte_perm(low, high, 0x7632);
        planes[1][i] = __byte_perm(low, high, 0x5410) ^ each_byte(128);
    }
#pragma unroll
    for (int p = 0; p < 2; ++p)
        sums[p] = __dp4a((int)planes[p][0], 0x01010101,
                         __dp4a((int)planes[p][1], 0x01010101, 0));
    int sum = 256 * sums[0] + sums[1];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return {largest * (1.0f / MOST_X), sum};
}

// Where piece c of a row that is not in order belongs.
template <class Stage>
__device__ __forceinline__ void places_of(const Stage& stage, int c, int4* places) {
    for (int i = 0; i < 2; ++i) places[i] = __ldg((const int4*)stage.place + 2 * c + i);
}

// Put a row of hidden states, to which the norm of a result will be added, where x will be.
template <class Stage> __device__ __forceinline__ void load_hidden(const Stage& stage, byte* xs) {
    for (int c = threadIdx.x; c < stage.k / 8; c += 32 * CTA_WARPS) {
        int4 places[2];
        places_of(stage, c, places);
        uint4 v = {0, 0, 0, 0};
        if (stage.hidden) v = __ldcg((const uint4*)stage.hidden + c);
        scatter<1>(v, places, 0, stage.k, xs, 0);
    }
}

// Add RN16(RN16(x · size) · weight) · multiplier to the hidden states where x will be. Each CTA
// stores a part of the sums, in the order of in-features.
template <class Stage>
__device__ __forceinline__ void add_normed(const Stage& stage, byte* xs, float* squares) {
    const int step = 32 * CTA_WARPS, all = stage.k / 8;
    uint4 v[X_PIECES];
    float square = 0.0f, added = 0.0f;
#pragma unroll
    for (int i = 0; i < X_PIECES; ++i) {
        const int c = threadIdx.x + i * step;
        if (c >= all) break;
        v[i] = __ldcg((const uint4*)stage.x + c);
        add_squares(v[i], square);
    }
    keep(square, squares);
    __syncthreads();
    const float size = size_of(squares, stage.k, stage.after_eps);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < X_PIECES; ++i) {
        const int c = threadIdx.x + i * step;
        if (c >= all) break;
        const uint4 weights = __ldg((const uint4*)stage.after + c);
        uint4* at = (uint4*)piece_of<1>(xs, 0, c);
        float old[8], y[8];
        u32 sum[4];
        pairs_of(*at, old);
        pairs_of(normed(v[i], size, weights), y);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            sum[e] = halves(old[2 * e] + y[2 * e] * stage.after_multiplier,
                            old[2 * e + 1] + y[2 * e + 1] * stage.after_multiplier);
        *at = {sum[0], sum[1], sum[2], sum[3]};
        add_squares(*at, added);
        if (blockIdx.x >= stage.ctas || c % stage.ctas != blockIdx.x) continue;
        for (int e = 0; e < 8; ++e)
            stage.sum[__ldg(stage.order + 8 * c + e)] = (half_bits)(sum[e / 2] >> (16 * (e % 2)));
    }
    keep(added, squares);
}

// Put rows of x that are not in order into shared memory, those of a part.
// places: of the first piece, already read; read: a piece of all rows.
template <int ROWS, class Stage, class Read>
__device__ __forceinline__ void reorder(const Stage& stage, int rows, int first, int end,
                                        int4* places, byte* xs, float (*squares)[CTA_WARPS],
                                        const Read& read) {
    float square[ROWS] = {};
    for (int c = threadIdx.x; c < stage.k / 8; c += 32 * CTA_WARPS) {
        uint4 v[ROWS];
        if (c != threadIdx.x) places_of(stage, c, places);
        read(c, v);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            scatter<ROWS>(v[r], places, first * 8, (end - first) * 8, xs, r);
            if (stage.norm) add_squares(v[r], square[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (stage.norm && r < rows) keep(square[r], squares[r]);
}

// Stage x. xs: where the part's x will be, which may begin within all of it. squares: per row, sums
// of the warps, for `size_of`: results are multiplied by it. read: a piece of rows not in order.
template <int ROWS, class Stage, class Read>
__device__ __forceinline__ void stage_x(const Stage& stage, int part, int rows, int4* places,
                                        byte* all_xs, byte* xs, Unit* units,
                                        float (*squares)[CTA_WARPS], const Read& read) {
    const int all = stage.k / 8, first = part * stage.length * PANEL_ROWS / 8;  // pieces of 8
    const int end = min(all, first + stage.length * PANEL_ROWS / 8);
    if (ADDS<ROWS> && stage.after) add_normed(stage, all_xs, squares[0]);
    else if (stage.place) reorder<ROWS>(stage, rows, first, end, places, xs, squares, read);
    if (stage.place) __syncthreads();
    const bool sums = stage.norm && !stage.place;
    float square[ROWS] = {};
    for (int base = threadIdx.x / 32 * 32 + (sums ? 0 : first); base < (sums ? all : end);
         base += 32 * CTA_WARPS) {
        const int c = base + threadIdx.x % 32, at = c - first;
        const bool is_own = c >= first && c < end;
        uint4 v[ROWS] = {};
        float weights[8] = {};
        if (stage.place && is_own)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) v[r] = *(const uint4*)piece_of<ROWS>(xs, r, at);
        else if (c < all) read_rows<ROWS>(stage, rows, c, v);
        if (stage.norm && is_own) pairs_of(__ldg((const uint4*)stage.norm + c), weights);
        __syncwarp();  // the four lanes of a panel have read it before one of them writes over it
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            if (sums) add_squares(v[r], square[r]);
            float numbers[8];
            u32 planes[2][2];
            pairs_of(v[r], numbers);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (stage.norm) numbers[e] *= weights[e];
            const Unit unit = quantize(numbers, planes);
            if (!is_own) continue;
            byte* to = xs + (at / 4 * ROWS + r) * 64 + at % 4 * 8;
            *(uint2*)to = {planes[0][0], planes[0][1]};
            *(uint2*)(to + 32) = {planes[1][0], planes[1][1]};
            if (at % 4 == 0) units[at / 4 * ROWS + r] = unit;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (sums && r < rows) keep(square[r], squares[r]);
    __syncthreads();
}

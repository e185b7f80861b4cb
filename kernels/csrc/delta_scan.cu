// The gated delta rule for prompts, by chunks of 64 tokens; see `by_chunks` of reference/delta.py.
//
// With δ of a chunk's tokens, c the logs of decays since it began, and S before it, per head:
//     (I + A) δ = β (V - e^c K S)      A_ij = β_i k_i·k_j e^(c_i - c_j), j < i
//     O = e^c Q S + P δ                P_ij = q_i·k_j e^(c_i - c_j), j <= i
//     S = e^(c_last) S + Kᵀ (e^(c_last - c) δ)
// `delta_chunks` makes normed keys and queries, T = (I + A)⁻¹ β and P, for all chunks at once. Their
// elements are at most 1, so they are fp16. `delta_scan` goes through the chunks of a text with some
// columns of a head's S, which do not depend on others. V, S and δ have no bound: they are rounded
// to TF32 as operands, sums are fp32. `delta_gate` norms the outputs.
#include "packed.cuh"
#include "cache_tiles.cuh"
#include "delta.cuh"

constexpr int CHUNK = 64, THREADS = 256, WARPS = THREADS / 32;
constexpr int COLUMNS = SCAN_COLUMNS, SPLITS = DIM / COLUMNS;
constexpr int OWN_TOKENS = CHUNK / WARPS;          // that a warp convolves
// Rows in shared memory, so that lanes use different banks: of fp16 numbers; of operands in the order
// of `read_rows`; of others
constexpr int WIDE = DIM + 8, STATE_ROW = DIM + 2, DELTA_ROW = CHUNK + 2, FADED_ROW = CHUNK + 8;
constexpr int SQUARE = CHUNK + 1;                  // rows of a matrix that is inverted
constexpr int TILE = 16, TILES = CHUNK / TILE;

struct Segment {  // tokens of a prompt in a pass; first_chunk: among those of all segments
    int slot, begin, start, count, first_chunk;
};

// Chunk i of a segment: `size` tokens from position `begin` on, `row` of the pass.
struct Chunk {
    int begin, size, row;

    __device__ Chunk(const Segment& s, int i) {
        const int border = (s.begin / CHUNK + i) * CHUNK, end = s.begin + s.count;
        begin = max(s.begin, border);
        size = min(end, border + CHUNK) - begin;
        row = s.start + begin - s.begin;
    }
};
__device__ __forceinline__ int chunks_of(const Segment& s) {
    return (s.begin + s.count + CHUNK - 1) / CHUNK - s.begin / CHUNK;
}
// The last page border that a segment passes, or 0.
__device__ __forceinline__ int border_of(const Segment& s) {
    const int border = (s.begin + s.count) / PAGE_TOKENS * PAGE_TOKENS;
    return border > s.begin ? border : 0;
}

// Inputs of the convolution at a position: of the pass, or of a slot's ring before it.
struct Inputs {
    const half_bits *pass, *ring;
    integer channels;
    int begin;

    __device__ Inputs(const half_bits* qkv, const half_bits* rings, const Segment& s, integer width)
        : pass(qkv + (integer)s.start * width), ring(rings + (integer)s.slot * RING * width),
          channels(width), begin(s.begin) {}
    __device__ const half_bits* at(int position, integer channel) const {  // null: zero
        if (position >= begin) return pass + (integer)(position - begin) * channels + channel;
        return position < 0 ? nullptr : ring + position % RING * channels + channel;
    }
};

// D += A B for TF32: 16 rows x 8, 8 x 8 columns.
__device__ __forceinline__ void mma_tf32(float* d, const float* a, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ __forceinline__ float tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
}
// Add 16 rows x 8 of fp16, which is exact in TF32, times 8 x 8 N columns of `b`, [column][row].
// upper, lower: of rows g and g + 8 the two columns that meet rows 0 and 1 of `b`.
template <int N>
__device__ __forceinline__ void add_product(float (*sums)[4], u32 upper, u32 lower, const float* b,
                                            int stride) {
    const float a[4] = {from_half(upper), from_half(lower), from_half(upper >> 16),
                        from_half(lower >> 16)};
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 two = *(const float2*)(b + 8 * n * stride);
        mma_tf32(sums[n], a, two.x, two.y);
    }
}
// The same for 16 rows x 32 K, in the order of `read_rows`, of which the last are zero from
// column `end` on.
template <int N, int K>
__device__ __forceinline__ void add_rows(float (*sums)[4], const uint4 (*rows)[2], const float* b,
                                         int stride, int end, int lane) {
    b += lane / 4 * stride + lane % 4 * 8;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (32 * k >= end) break;
        const uint4 upper = rows[k][0], lower = rows[k][1];
        add_product<N>(sums, upper.x, lower.x, b + 32 * k, stride);
        add_product<N>(sums, upper.y, lower.y, b + 32 * k + 2, stride);
        add_product<N>(sums, upper.z, lower.z, b + 32 * k + 4, stride);
        add_product<N>(sums, upper.w, lower.w, b + 32 * k + 6, stride);
    }
}
// Where a lane's row of four matrices of 8 x 8 lies: two below each other, then those beside them;
// or, if they are turned, beside each other first.
__device__ __forceinline__ u32 tile_row(u32 at, int row, int column, int stride, bool turned,
                                        int lane) {
    const int second = lane >> 3 & 1, third = lane >> 4;
    row += lane % 8 + 8 * (turned ? third : second), column += 8 * (turned ? second : third);
    return at + (row * stride + column) * (int)sizeof(half_bits);
}
// Read 16 rows x 32 K of a matrix: of rows g and g + 8, columns 8 t to 8 t + 7 of each 32.
template <int K>
__device__ __forceinline__ void read_rows(uint4 (*rows)[2], const half_bits* from, int stride,
                                          int lane) {
    from += lane / 4 * stride + lane % 4 * 8;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int h = 0; h < 2; ++h) rows[k][h] = *(const uint4*)(from + 8 * stride * h + 32 * k);
}

// Write a chunk's normed keys and queries of a head to shared and global memory.
__device__ __forceinline__ void convolve(const Inputs& inputs, const Chunk& chunk,
                                         const float* conv, integer first, half_bits* shared,
                                         half_bits* global, float factor, int warp, int lane) {
    const integer channel = first + 4 * lane;
    float weights[4][TAPS], seen[TAPS][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float4 w = *(const float4*)(conv + (channel + c) * TAPS);
        weights[c][0] = w.x, weights[c][1] = w.y, weights[c][2] = w.z, weights[c][3] = w.w;
    }
#pragma unroll
    for (int j = 1 - TAPS; j < OWN_TOKENS; ++j) {
        const int i = warp * OWN_TOKENS + j, at = (j + TAPS - 1) % TAPS;
        const half_bits* from =
            i < chunk.size ? inputs.at(chunk.begin + i, channel) : nullptr;
        const uint2 four = from ? *(const uint2*)from : uint2{};
        seen[at][0] = from_half(four.x), seen[at][1] = from_half(four.x >> 16);
        seen[at][2] = from_half(four.y), seen[at][3] = from_half(four.y >> 16);
        if (j < 0) continue;
        float out[4], square = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) sum += seen[(at + 1 + t) % TAPS][c] * weights[c][t];
            out[c] = silu(sum), square += out[c] * out[c];
        }
        const float size = i < chunk.size ? rsqrtf(sum_of_warp(square) + TINY) * factor : 0.0f;
        const uint2 bits = {halves(out[0] * size, out[1] * size),
                            halves(out[2] * size, out[3] * size)};
        *(uint2*)(shared + i * WIDE + 4 * lane) = bits;
        *(uint2*)(global + i * DIM + 4 * lane) = bits;
    }
}

// Write (I + A)⁻¹ to `inverse`: its tiles of 16 x 16 on and below the diagonal. A is strictly lower
// triangular. By tiles: T_ij = -T_ii Σ_(j <= l < i) A_il T_lj.
__device__ __forceinline__ void invert(const float (*a)[SQUARE], float (*inverse)[SQUARE],
                                       int thread) {
    if (thread < CHUNK) {  // a column of a diagonal tile
        const int from = thread / TILE * TILE, column = thread % TILE;
        float t[TILE];
#pragma unroll
        for (int i = 0; i < TILE; ++i) {
            float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (int l = 0; l < i; ++l) sum -= a[from + i][from + l] * t[l];
            inverse[from + i][from + column] = t[i] = sum;
        }
    }
    __syncthreads();
    const int row = thread / TILE, column = thread % TILE;
#pragma unroll
    for (int d = 1; d < TILES; ++d) {
        for (int j = 0; j < TILES - d; ++j) {
            const int top = (j + d) * TILE, left = j * TILE;
            float sum = 0.0f;
#pragma unroll 16
            for (int l = left; l < top; ++l) sum += a[top + row][l] * inverse[l][left + column];
            inverse[top + row][left + column] = sum;
        }
        __syncthreads();
        float product[TILES];
#pragma unroll
        for (int j = 0; j < TILES - d; ++j) {
            const int top = (j + d) * TILE, left = j * TILE;
            product[j] = 0.0f;
#pragma unroll
            for (int l = 0; l < TILE; ++l)
                product[j] -= inverse[top + row][top + l] * inverse[top + l][left + column];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < TILES - d; ++j)
            inverse[(j + d) * TILE + row][j * TILE + column] = product[j];
        __syncthreads();
    }
}

// A CTA has chunk blockIdx.x of segment blockIdx.z, and the value heads of key head blockIdx.y.
extern "C" __global__ void __launch_bounds__(THREADS)
delta_chunks(const half_bits* qkv, const float* logits, const Segment* segments,
             const float* conv, const float* decay, const float* step, const half_bits* rings,
             half_bits* aside_inputs, half_bits* keys, half_bits* queries, half_bits* solved,
             half_bits* scores, float* logs, integer key_heads, integer value_heads) {
    __shared__ __align__(16) half_bits room[2 * CHUNK * WIDE];
    __shared__ float decays[CHUNK], betas[CHUNK];
    const Segment segment = segments[blockIdx.z];
    if ((int)blockIdx.x >= chunks_of(segment)) return;
    const Chunk chunk(segment, blockIdx.x);
    const int key_head = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int number = segment.first_chunk + blockIdx.x, shared = (int)(value_heads / key_heads);
    const integer channels = (2 * key_heads + value_heads) * DIM;
    const Inputs inputs(qkv, rings, segment, channels);
    half_bits *q = room, *k = room + CHUNK * WIDE;
    const integer of_keys = ((integer)number * key_heads + key_head) * CHUNK * DIM;
    convolve(inputs, chunk, conv, key_head * DIM, q, queries + of_keys, rsqrtf(DIM), warp, lane);
    convolve(inputs, chunk, conv, (key_heads + key_head) * DIM, k, keys + of_keys, 1.0f, warp, lane);
    const int border = border_of(segment);
    if (border && chunk.begin + chunk.size == border)
        for (int i = thread; i < (2 + shared) * DIM; i += THREADS) {
            const integer channel = channel_of(i, key_head,
                                               key_head * shared + i / DIM - 2, key_heads);
            for (int t = 0; t < TAPS - 1; ++t) {
                const half_bits* from = inputs.at(border - (TAPS - 1) + t, channel);
                aside_inputs[((integer)segment.slot * (TAPS - 1) + t) * channels + channel] = *from;
            }
        }
    __syncthreads();

    // A warp has 16 rows and 32 columns of products of keys with keys, and with queries.
    const int top = warp / 2 * TILE, left = warp % 2 * 32, g = lane / 4, t = lane % 4;
    float of_key[4][4] = {}, of_query[4][4] = {};
    const u32 k_at = shared_address(k), q_at = shared_address(q);
#pragma unroll 2
    for (int i = 0; i < DIM; i += 16) {
        u32 a[4], b[2][4], c[4];
        words_of<false>(a, tile_row(k_at, top, i, WIDE, false, lane));
        words_of<false>(c, tile_row(q_at, top, i, WIDE, false, lane));
#pragma unroll
        for (int n = 0; n < 2; ++n)
            words_of<false>(b[n], tile_row(k_at, left + 16 * n, i, WIDE, false, lane));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            mma(of_key[n], a, b[n / 2][n % 2], b[n / 2][n % 2 + 2]);
            mma(of_query[n], c, b[n / 2][n % 2], b[n / 2][n % 2 + 2]);
        }
    }
    float(*system)[SQUARE] = (float(*)[SQUARE])room, (*inverse)[SQUARE] = system + CHUNK;
    for (int head = key_head * shared; head < (key_head + 1) * shared; ++head) {
        __syncthreads();  // what the room held is read
        const integer of_head = (integer)number * value_heads + head;
        if (warp == 0) {  // decays since the chunk began; a lane has two tokens
            float two[2], before;
            for (int h = 0; h < 2; ++h) {
                const int i = 2 * lane + h;
                const float* own = logits + (integer)(chunk.row + i) * 2 * value_heads + head;
                const bool is_there = i < chunk.size;
                two[h] = is_there ? log_decay(own[value_heads] + step[head], decay[head]) : 0.0f;
                betas[i] = is_there ? step_size(own[0]) : 0.0f;
            }
            float sum = two[0] + two[1];
            for (int offset = 1; offset < 32; offset <<= 1) {
                const float other = __shfl_up_sync(~0u, sum, offset);
                if (lane >= offset) sum += other;
            }
            before = __shfl_up_sync(~0u, sum, 1);
            two[0] += lane ? before : 0.0f, two[1] += two[0];
            for (int h = 0; h < 2; ++h)
                decays[2 * lane + h] = logs[of_head * CHUNK + 2 * lane + h] = two[h];
        }
        __syncthreads();
        half_bits* to = scores + of_head * CHUNK * CHUNK;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = top + g + 8 * h, j = left + 8 * n + 2 * t;
                float score[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float fade = j + c > i ? 0.0f : expf(decays[i] - decays[j + c]);
                    score[c] = of_query[n][2 * h + c] * fade;
                    system[i][j + c] = j + c < i ? of_key[n][2 * h + c] * fade * betas[i] : 0.0f;
                    inverse[i][j + c] = 0.0f;
                }
                *(u32*)(to + i * CHUNK + j) = halves(score[0], score[1]);
            }
        __syncthreads();
        invert(system, inverse, thread);
        u32* words = (u32*)(solved + of_head * CHUNK * CHUNK);
        for (int n = thread; n < CHUNK * CHUNK / 2; n += THREADS) {
            const int i = n / (CHUNK / 2), j = n % (CHUNK / 2) * 2;
            words[n] = halves(inverse[i][j] * betas[j], inverse[i][j + 1] * betas[j + 1]);
        }
    }
}

// A CTA has COLUMNS of the state of a value head, blockIdx.x / SPLITS, of segment blockIdx.y. Warps 0
// to 3 have 16 rows of K S, then 32 of S; the others 16 rows of O, whose fp16 operands they read from
// global memory.
struct ScanRoom {
    half_bits keys[2][CHUNK * WIDE];
    float state[COLUMNS * STATE_ROW];  // [column][row], as all below
    float values[COLUMNS * DELTA_ROW], deltas[COLUMNS * DELTA_ROW], faded[COLUMNS * FADED_ROW];
    float logs[2][CHUNK];
};
static_assert(sizeof(ScanRoom) == SCAN_ROOM, "what launches reserve");

extern "C" __global__ void __launch_bounds__(THREADS)
delta_scan(const half_bits* qkv, const Segment* segments, const float* conv,
           const half_bits* rings, const half_bits* keys, const half_bits* queries,
           const half_bits* solved, const half_bits* scores, const float* logs, float* states,
           float* asides, float* outputs, integer key_heads, integer value_heads) {
    extern __shared__ __align__(16) byte dynamic[];
    ScanRoom& room = *(ScanRoom*)dynamic;
    const Segment segment = segments[blockIdx.y];
    const int head = blockIdx.x / SPLITS, first = blockIdx.x % SPLITS * COLUMNS;
    const int key_head = head / (int)(value_heads / key_heads), chunks = chunks_of(segment);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4, tile = warp % 4;
    const bool has_state = warp < 4;
    const Inputs inputs(qkv, rings, segment, (2 * key_heads + value_heads) * DIM);
    const integer channel = (2 * key_heads + head) * DIM + first + lane;
    const float4 taps = *(const float4*)(conv + channel * TAPS);

    const auto begin_keys = [&](int i) {
        const integer number = segment.first_chunk + i;
        const half_bits* from = keys + (number * key_heads + key_head) * CHUNK * DIM;
        for (int n = thread; n < CHUNK * DIM / 8; n += THREADS)
            begin_copy<16>(shared_address(room.keys[i % 2] + n / 16 * WIDE + n % 16 * 8),
                           from + 8 * n, true);
        if (thread < CHUNK / 4)
            begin_copy<16>(shared_address(room.logs[i % 2] + 4 * thread),
                           logs + (number * value_heads + head) * CHUNK + 4 * thread, true);
        end_step();
    };
    half_bits seen[OWN_TOKENS + TAPS - 1];
    const auto read_values = [&](int i) {
        const Chunk chunk(segment, i);
#pragma unroll
        for (int n = 0; n < OWN_TOKENS + TAPS - 1; ++n) {
            const int at = warp * OWN_TOKENS + n - (TAPS - 1);
            const half_bits* from =
                at < chunk.size ? inputs.at(chunk.begin + at, channel) : nullptr;
            seen[n] = from ? *from : 0;
        }
    };
    const auto write_values = [&](int i) {
        const Chunk chunk(segment, i);
        float out[OWN_TOKENS];
#pragma unroll
        for (int n = 0; n < OWN_TOKENS; ++n) {
            const float sum = from_half(seen[n]) * taps.x + from_half(seen[n + 1]) * taps.y +
                              from_half(seen[n + 2]) * taps.z + from_half(seen[n + 3]) * taps.w;
            out[n] = warp * OWN_TOKENS + n < chunk.size ? silu(sum) : 0.0f;
        }
        float2* to = (float2*)(room.values + lane * DELTA_ROW + warp * OWN_TOKENS);
#pragma unroll
        for (int n = 0; n < OWN_TOKENS / 2; ++n) to[n] = {out[2 * n], out[2 * n + 1]};
    };
    // A lane's part of the state: two rows and two columns of each tile of 16 x 8
    float s[2][4][4] = {};
    const auto each_pair = [&](const auto& act) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    act(&s[m][n][2 * h], 32 * tile + 16 * m + g + 8 * h, 8 * n + 2 * t);
    };
    const integer of_state = ((integer)segment.slot * value_heads + head) * DIM * DIM + first;
    const auto store_state = [&](float* to) {
        each_pair([&](float* two, int row, int column) {
            *(float2*)(to + of_state + row * DIM + column) = {two[0], two[1]};
        });
    };
    const auto share_state = [&] {
        each_pair([&](float* two, int row, int column) {
            room.state[column * STATE_ROW + row] = tf32(two[0]);
            room.state[(column + 1) * STATE_ROW + row] = tf32(two[1]);
        });
    };
    uint4 q[DIM / 32][2];
    const auto read_queries = [&](int i) {
        const integer number = (integer)(segment.first_chunk + i) * key_heads + key_head;
        read_rows<DIM / 32>(q, queries + (number * CHUNK + 16 * tile) * DIM, DIM, lane);
    };

    begin_keys(0);
    read_values(0);
    if (has_state) {
        if (segment.begin)
            each_pair([&](float* two, int row, int column) {
                const float2 old = *(const float2*)(states + of_state + row * DIM + column);
                two[0] = old.x, two[1] = old.y;
            });
        share_state();
    } else read_queries(0);
    write_values(0);
    for (int i = 0; i < chunks; ++i) {
        wait_for_step(0);
        __syncthreads();
        const bool is_last = i + 1 == chunks;
        if (!is_last) begin_keys(i + 1), read_values(i + 1);
        const Chunk chunk(segment, i);
        const half_bits* k = room.keys[i % 2];
        const float* c = room.logs[i % 2];
        const integer of_head = (integer)(segment.first_chunk + i) * value_heads + head;
        const integer of_square = (of_head * CHUNK + 16 * tile) * CHUNK;
        const int end = 16 * (tile + 1);  // above the diagonal, T and P are zero
        uint4 solve[CHUNK / 32][2], p[CHUNK / 32][2];
        read_rows<CHUNK / 32>(solve, solved + of_square, CHUNK, lane);
        float sums[4][4] = {};
        const float early[2] = {expf(c[16 * tile + g]), expf(c[16 * tile + g + 8])};
        if (has_state) {
            uint4 rows[DIM / 32][2];
            read_rows<DIM / 32>(rows, k + 16 * tile * WIDE, WIDE, lane);
            add_rows<4, DIM / 32>(sums, rows, room.state, STATE_ROW, DIM, lane);
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float* value = room.values + (8 * n + 2 * t + e % 2) * DELTA_ROW +
                                   16 * tile + g + e / 2 * 8;
                    *value = tf32(*value - early[e / 2] * sums[n][e]);
                }
        } else {
            read_rows<CHUNK / 32>(p, scores + of_square, CHUNK, lane);
            add_rows<4, DIM / 32>(sums, q, room.state, STATE_ROW, DIM, lane);
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[n][e] *= early[e / 2];
            if (!is_last) read_queries(i + 1);
        }
        __syncthreads();
        float delta[2][4] = {};
        const int half = 16 * (warp / 4);  // of the columns
        add_rows<2, CHUNK / 32>(delta, solve, room.values + half * DELTA_ROW, DELTA_ROW, end, lane);
        const float whole = c[CHUNK - 1];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 16 * tile + g + e / 2 * 8;
                const int column = half + 8 * n + 2 * t + e % 2;
                room.deltas[column * DELTA_ROW + row] = tf32(delta[n][e]);
                room.faded[column * FADED_ROW + row] = tf32(delta[n][e] * expf(whole - c[row]));
            }
        __syncthreads();
        if (!is_last) write_values(i + 1);
        if (has_state) {
            const float kept = expf(whole);
            each_pair([&](float* two, int, int) { two[0] *= kept, two[1] *= kept; });
#pragma unroll
            for (int n = 0; n < CHUNK; n += 16)
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    u32 a[4];
                    words_of<true>(a, tile_row(shared_address(k), n, 32 * tile + 16 * m, WIDE,
                                               true, lane));
                    const float* b = room.faded + g * FADED_ROW + n + 2 * t;
                    add_product<4>(s[m], a[0], a[1], b, FADED_ROW);
                    add_product<4>(s[m], a[2], a[3], b + 8, FADED_ROW);
                }
            if (!is_last) share_state();
            if (chunk.begin + chunk.size == border_of(segment)) store_state(asides);
        } else {
            add_rows<4, CHUNK / 32>(sums, p, room.deltas, DELTA_ROW, end, lane);
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = 16 * tile + g + 8 * h;
                    const integer at = (integer)(chunk.row + row) * value_heads + head;
                    if (row < chunk.size)
                        *(float2*)(outputs + at * DIM + first + 8 * n + 2 * t) =
                            {sums[n][2 * h], sums[n][2 * h + 1]};
                }
        }
    }
    if (has_state) store_state(states);
}

// A warp norms and gates the outputs of a token of the pass, blockIdx.x, and a head. The last inputs of
// the convolution enter the rings, which nobody reads any more.
extern "C" __global__ void __launch_bounds__(THREADS)
delta_gate(const half_bits* qkv, const half_bits* z, half_bits* y, const Segment* segments,
           const float* norm, const float* outputs, half_bits* rings, int* behinds, int* aside_at,
           integer key_heads, integer value_heads, float eps) {
    const int row = blockIdx.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const integer channels = (2 * key_heads + value_heads) * DIM;
    while (row >= segments->start + segments->count) ++segments;
    const Segment segment = *segments;
    const int position = segment.begin + row - segment.start, end = segment.begin + segment.count;
    const float4 weights = ((const float4*)norm)[lane];
    const integer head = (integer)blockIdx.y * WARPS + warp;
    if (head < value_heads) {
        const integer at = ((integer)row * value_heads + head) * DIM + 4 * lane;
        const float4 o = *(const float4*)(outputs + at);
        const uint2 gate = *(const uint2*)(z + at);
        const float square = o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w;
        const float size = rsqrtf(sum_of_warp(square) / DIM + eps);
        *(uint2*)(y + at) = {halves(o.x * size * weights.x * silu(from_half(gate.x)),
                                    o.y * size * weights.y * silu(from_half(gate.x >> 16))),
                             halves(o.z * size * weights.z * silu(from_half(gate.y)),
                                    o.w * size * weights.w * silu(from_half(gate.y >> 16)))};
    }
    if (blockIdx.y) return;
    if (position >= end - (TAPS - 1))
        for (integer i = thread; i < channels; i += THREADS)
            rings[((integer)segment.slot * RING + position % RING) * channels + i] =
                qkv[row * channels + i];
    if (position + 1 < end) return;
    for (integer i = thread; i < value_heads; i += THREADS)
        behinds[segment.slot * value_heads + i] = end;
    const int border = border_of(segment);
    if (thread == 0 && (border || !segment.begin)) aside_at[segment.slot] = border;
}

// Attention of eight or sixteen columns, pairs of a new token and a query head: an mma's columns.
// Code offsets and scales of keys are applied to the scores, scales of values to the weights.

template <int WIDTH, int KE, int VE, int POSITIONS, int TOKENS, int COLUMNS> struct Wide {
    using Keys = Tiles<WIDTH, KE>;
    using Values = Tiles<WIDTH, VE>;
    static constexpr int VALUES_AT = POSITIONS * Keys::ROW;
    static constexpr int BLOCKS = WIDTH / 16, PAIRS = WIDTH / 8, RUNS = WIDTH / 32;
    static constexpr int SETS = COLUMNS / 8;  // of an mma's columns
    int lane, g, t, earliest, latest;  // positions of the first and the last token
    int own_place[2 * SETS];           // of columns 2 t and 2 t + 1 of each set
    u32 q[SETS][PAIRS];                // of column g of each set
    float bases[SETS][RUNS][4] = {};   // minus the codes' offset, for columns 2 t and 2 t + 1
    float o[SETS][BLOCKS][4] = {}, most[2 * SETS], total[2 * SETS] = {};

    // A head as pairs that a lane holds.
    __device__ __forceinline__ static void prepare(u32* query, const float* head, float factor,
                                                   int lane) {
        for (int i = lane; i < WIDTH / 2; i += 32) {
            const int of = i / PAIRS, pair = i % PAIRS;
            query[i] = halves(head[Keys::first_of(pair, of)] * factor,
                              head[Keys::second_of(pair, of)] * factor);
        }
    }

    // queries: rows of (WIDTH / 2 + 4) words; length: of the sequence before the new tokens.
    __device__ __forceinline__ Wide(const u32 (*queries)[WIDTH / 2 + 4],
                                    const Columns<TOKENS>& columns, int length, int lane, int)
        : lane(lane), g(lane / 4), t(lane % 4), earliest(length + columns.token(0)),
          latest(length + columns.token(columns.count - 1)) {
#pragma unroll
        for (int i = 0; i < SETS * PAIRS; i += 4) {
            const int column = i / PAIRS * 8 + g;
            uint4 v = {0, 0, 0, 0};
            if (column < columns.count)
                v = *(const uint4*)(queries[column] + t * PAIRS + i % PAIRS);
            u32* const to = q[i / PAIRS] + i % PAIRS;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
        if constexpr (is_rotated<KE>()) {
#pragma unroll
            for (int i = 0; i < SETS * BLOCKS; ++i) {
                const u32 low = center<KE>(0) ^ 0x80008000u, high = center<KE>(1) ^ 0x80008000u;
                const u32 a[4] = {low, low, high, high};
                const u32* b = q[i / BLOCKS] + i % BLOCKS * 2;
                mma(bases[i / BLOCKS][i % BLOCKS / 2], a, b[0], b[1]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2 * SETS; ++h) {
            own_place[h] = length + columns.token(h / 2 * 8 + 2 * t + h % 2);
            most[h] = NOTHING;
        }
    }

    // Add POSITIONS positions from `first` on.
    __device__ __forceinline__ void add(const byte* stage, int first, const Call& call,
                                        const Cap& cap) {
        float s[SETS][POSITIONS / 16][4];  // positions g and 8 + g, columns 2 t and 2 t + 1
        const u32 key_at = shared_address(stage) + Keys::place(lane);
#pragma unroll
        for (int tile = 0; tile < POSITIONS / 16; ++tile) {
            u32 scales[2][RUNS / 2];
            float sums[SETS][2][4] = {};
            if constexpr (is_rotated<KE>())
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    Keys::read_scales(scales[i], stage + (16 * tile + 8 * i + g) * Keys::ROW);
#pragma unroll
            for (int i = 0; i < 4 * SETS; ++i) s[i / 4][tile][i % 4] = 0.0f;
            Words<KE, false> chunks;
            u32 words[4];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                constexpr int TOGETHER = Keys::PAIRS;  // blocks per two chunks
                if (block % TOGETHER == 0)
                    chunks.read(words, key_at + 16 * tile * Keys::ROW, block / TOGETHER);
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i] = Keys::element(words, block % TOGETHER * 2 + i / 2, i % 2);
#pragma unroll
                for (int set = 0; set < SETS; ++set) {
                    const u32* b = q[set] + 2 * block;
                    if constexpr (!is_rotated<KE>()) {
                        mma(sums[set][block % 2], a, b[0], b[1]);
                    } else if (block % 2 == 0) {
                        mma_onto(sums[set][0], a, b, bases[set][block / 2]);
                    } else {
                        mma(sums[set][0], a, b[0], b[1]);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const u32 two = scales[i / 2][block / 4];
                            const float scale_of_run = from_half(two >> 16 * (block / 2 % 2));
                            s[set][tile][i] += sums[set][0][i] * scale_of_run;
                        }
                    }
                }
            }
            if constexpr (!is_rotated<KE>())
#pragma unroll
                for (int i = 0; i < 4 * SETS; ++i)
                    s[i / 4][tile][i % 4] = sums[i / 4][0][i % 4] + sums[i / 4][1][i % 4];
        }
        float m[2 * SETS];
        bool is_more = false;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            float* const of_set = &s[set][0][0];
            if (call.softcap > 0.0f)
#pragma unroll
                for (int i = 0; i < POSITIONS / 4; ++i) of_set[i] = cap(of_set[i]);
            if (first <= latest - call.window || first + POSITIONS > earliest + 1)
#pragma unroll
                for (int i = 0; i < POSITIONS / 4; ++i) {
                    const int position = first + i / 2 * 8 + g;
                    const int ahead = position - own_place[2 * set + i % 2];
                    if (ahead > 0 || ahead <= -call.window) of_set[i] = HIDDEN;
                }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                m[2 * set + h] = of_set[h];
#pragma unroll
                for (int i = 2 + h; i < POSITIONS / 4; i += 2)
                    m[2 * set + h] = fmaxf(m[2 * set + h], of_set[i]);
                is_more |= m[2 * set + h] > most[2 * set + h];
            }
        }
        if (__any_sync(~0u, is_more))
#pragma unroll
            for (int h = 0; h < 2 * SETS; ++h) {
                for (int other = 4; other < 32; other *= 2)
                    m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], other));
                m[h] = fmaxf(m[h], most[h]);
                const float shrink = power(most[h] - m[h]);
                most[h] = m[h], total[h] *= shrink;
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
                    o[h / 2][block][h % 2] *= shrink, o[h / 2][block][2 + h % 2] *= shrink;
            }
        stage += VALUES_AT;
        const u32 value_at = shared_address(stage) + Values::place(lane);
#pragma unroll
        for (int tile = 0; tile < POSITIONS / 16; ++tile) {
            u32 scaled[SETS][RUNS][2];
            u32 b[SETS][2];  // weights of positions 2 t, 2 t + 1, and 8 after them, for column g
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                float p[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    p[i] = power(s[set][tile][i] - most[2 * set + i % 2]);
                    total[2 * set + i % 2] += p[i];
                }
                b[set][0] = turned_matrix(halves(p[0], p[1]));
                b[set][1] = turned_matrix(halves(p[2], p[3]));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 even[RUNS / 2], odd[RUNS / 2];
                const byte* of_row = stage + (16 * tile + 8 * i + 2 * t) * Values::ROW;
                if constexpr (is_rotated<VE>()) {
                    Values::read_scales(even, of_row);
                    Values::read_scales(odd, of_row + Values::ROW);
                }
#pragma unroll
                for (int run = 0; run < RUNS; ++run)
#pragma unroll
                    for (int set = 0; set < SETS; ++set)
                        scaled[set][run][i] =
                            is_rotated<VE>()
                                ? times(b[set][i], __byte_perm(even[run / 2], odd[run / 2],
                                                               run % 2 ? 0x7632 : 0x5410))
                                : b[set][i];
            }
            Words<VE, true> chunks;
            u32 words[4];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                constexpr int TOGETHER = Values::PAIRS;
                if (block % TOGETHER == 0)
                    chunks.read(words, value_at + 16 * tile * Values::ROW, block / TOGETHER);
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int pair = block % TOGETHER * 2 + i % 2;
                    a[i] = Values::element(words, pair, i / 2);
                    if constexpr (is_rotated<VE>()) a[i] = less(a[i], center<VE>(pair % 2));
                }
#pragma unroll
                for (int set = 0; set < SETS; ++set)
                    mma(o[set][block], a, scaled[set][block / 2][0], scaled[set][block / 2][1]);
            }
        }
    }

    // o[set][block]: columns 2 t and 2 t + 1 of row 2 block, then of row 2 block + 1
    __device__ __forceinline__ void leave(float* maxima, float* totals) {
#pragma unroll
        for (int h = 0; h < 2 * SETS; ++h) {
            const int column = h / 2 * 8 + 2 * t + h % 2;
            for (int other = 4; other < 32; other *= 2)
                total[h] += __shfl_xor_sync(~0u, total[h], other);
            if (g == 0) maxima[column] = most[h], totals[column] = total[h];
        }
    }

    // Store the sums of values (COLUMNS, WIDTH + 1), relative to the maxima of all warps.
    __device__ __forceinline__ void store(float* to, const float* maxima, int apart, int warps,
                                          int count) const {
#pragma unroll
        for (int h = 0; h < 2 * SETS; ++h) {
            const int column = h / 2 * 8 + 2 * t + h % 2;
            float m = NOTHING;
            for (int w = 0; w < warps; ++w) m = fmaxf(m, maxima[w * apart + column]);
            const float shrink = power(most[h] - m);
            if (column >= count) continue;
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i)
                to[column * (WIDTH + 1) + Values::summed(i, g)] =
                    o[h / 2][i / 2][i % 2 * 2 + h % 2] * shrink;
        }
    }
};

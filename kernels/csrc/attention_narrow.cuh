// Attention of one new token whose one, two or four query heads share a key head, to codes. An
// mma's eight columns then have room for the parts of a head, which saves what else is done for
// every run of 32 elements: queries are integers of 16 bits, two columns each, and a column has
// only the elements of one run, so that one sum serves all runs; a column of weights has the scales
// of one run, so that one operand serves all values.

__device__ __forceinline__ float larger(float a, float b) {  // NaN if either is
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

#define CODE_UNIT 5.9604644775390625e-8f  // 2^-24, fp16's least number: a code as its bits

// HEADS: key heads of a warp, of COPIED that are in shared memory.
template <int WIDTH, int KE, int VE, int POSITIONS, int COLUMNS, int HEADS, int COPIED>
struct Narrow {
    using Keys = Tiles<COPIED * WIDTH, KE, (COPIED > 1)>;
    using Values = Tiles<COPIED * WIDTH, VE, (COPIED > 1)>;
    static constexpr int VALUES_AT = POSITIONS * Keys::ROW;
    static constexpr int BLOCKS = WIDTH / 16, RUNS = WIDTH / 32, TILES = POSITIONS / 16;
    // A set of key heads shares an mma's columns when values are added: two of one column each.
    static constexpr int SHARED = HEADS > 1 && COLUMNS == HEADS ? 2 : 1, SETS = HEADS / SHARED;
    // The lanes of equal t / LANES have a column of a set. Runs of a key: lanes of equal
    // t / SHARERS have a column of its head, and SUMMED adjacent runs share a sum.
    static constexpr int LANES = 4 * SETS / COLUMNS, SHARERS = SHARED * LANES;
    static constexpr int SUMMED = SHARERS < RUNS ? SHARERS : RUNS, SUMS = RUNS / SUMMED;
    static constexpr int SCALED = 2 * LANES < RUNS ? 2 * LANES : RUNS;  // runs of an operand
    static constexpr int OPERANDS = RUNS / SCALED;
    static constexpr int KEY_CENTER = KE == ROTATED_4 ? 8 : 128;
    static constexpr int VALUE_CENTER = VE == ROTATED_4 ? 8 : 128;
    static constexpr int MOST = 32512;  // of a query's integers: 127 · 256
    int length, lane, g, t, first_head;
    u32 q[HEADS][RUNS][2];     // of the runs of column g; otherwise zero
    int centers[HEADS][SUMS];  // the sum of the queries, times the codes' center
    float unit[HEADS][SUMS];   // of the queries' integers
    float o[SETS][BLOCKS][4] = {}, excess[SETS][4] = {}, most[SETS], total[SETS] = {};

    // A head as integers of 16 bits: the upper bytes, the lower bytes (signed), the runs' units.
    __device__ __forceinline__ static void prepare(u32* query, const float* head, float factor,
                                                   int lane) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const float x = head[32 * run + lane] * factor;
            float largest = fabsf(x);
            for (int i = 1; i < 32; i *= 2)
                largest = larger(largest, __shfl_xor_sync(~0u, largest, i));
            const int n = __float2int_rn(largest > 0.0f ? __fdiv_rn(x, largest) * MOST : 0.0f);
            const int upper = (n + 128) >> 8;
            const int place = KE == ROTATED_4 ? lane % 2 * 16 + lane / 2 : lane;
            byte* const to = (byte*)query + 32 * run + place;
            to[0] = upper, to[WIDTH] = n - 256 * upper;
            if (lane == 0) ((float*)query)[WIDTH / 2 + run] = largest / MOST;
        }
    }

    // queries: rows of (WIDTH / 2 + 4) words; length: of the sequence before the new token.
    __device__ __forceinline__ Narrow(const u32 (*queries)[WIDTH / 2 + 4],
                                      const Columns<1>& columns, int length, int lane,
                                      int first_head)
        : length(length), lane(lane), g(lane / 4), t(lane % 4), first_head(first_head) {
#pragma unroll
        for (int set = 0; set < SETS; ++set) most[set] = NOTHING;
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            const int first = head * (COLUMNS / HEADS), column = first + g / 2 / SHARERS;
#pragma unroll
            for (int run = 0; run < RUNS; ++run)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const bool is_there =
                        column < columns.count && run % SUMMED == g / 2 % SUMMED;
                    const u32* const of_plane = queries[column] + g % 2 * (WIDTH / 4);
                    q[head][run][i] = is_there ? of_plane[8 * run + 4 * i + t] : 0;
                }
#pragma unroll
            for (int sum = 0; sum < SUMS; ++sum) {
                const u32 code = 0x01010101u * KEY_CENTER, a[4] = {code, code, code, code};
                int of_sum[4] = {};
#pragma unroll
                for (int run = SUMMED * sum; run < SUMMED * (sum + 1); ++run)
                    mma_unsigned(of_sum, a, q[head][run][0], q[head][run][1]);
                centers[head][sum] = 256 * of_sum[0] + of_sum[1];
                const int own = first + t / SHARERS, run = SUMMED * sum + t % SUMMED;
                unit[head][sum] =
                    own < columns.count ? ((const float*)queries[own])[WIDTH / 2 + run] : 0.0f;
            }
        }
    }

    // Add POSITIONS positions from `first` on.
    __device__ __forceinline__ void add(const byte* stage, int first, const Call& call,
                                        const Cap& cap) {
        float s[SETS][2 * TILES];  // of positions 8 i + g
        const u32 key_at = shared_address(stage) + Keys::place(lane);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float scores[HEADS][2] = {};
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                const u32 head_at = key_at + 16 * tile * Keys::ROW +
                                    (first_head + head) * (Keys::BYTES / COPIED);
                int sums[SUMS][4] = {};
                Words<KE, false> chunks;
                u32 words[4];
#pragma unroll
                for (int run = 0; run < RUNS; ++run) {
                    u32 a[4];
                    if constexpr (read_as<KE>() == ROTATED_8) {
                        chunks.read(a, head_at, run);
                    } else {
                        if (run % 2 == 0) chunks.read(words, head_at, run / 2);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            a[i] = words[run % 2 * 2 + i % 2] >> 4 * (i / 2) & 0x0f0f0f0fu;
                    }
                    mma_unsigned(sums[run / SUMMED], a, q[head][run][0], q[head][run][1]);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const byte* of_row = stage + (16 * tile + 8 * i + g) * Keys::ROW + Keys::BYTES;
#pragma unroll
                    for (int sum = 0; sum < SUMS; ++sum) {
                        const int run = SUMMED * sum + t % SUMMED;
                        const half_bits scale =
                            ((const half_bits*)of_row)[(first_head + head) * RUNS + run];
                        const int* const two = sums[sum] + 2 * i;
                        scores[head][i] += (float)(256 * two[0] + two[1] - centers[head][sum]) *
                                           (from_half(scale) * unit[head][sum]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * SETS; ++i) {
                const int first = i / 2 * SHARED;  // head
                float score = scores[first][i % 2];
                if constexpr (SHARED == 2) {  // the lanes' halves exchange what is the other's
                    const float second = scores[first + 1][i % 2];
                    const float others = t < 2 ? second : score;
                    score = (t < 2 ? score : second) + __shfl_xor_sync(~0u, others, 2);
                }
#pragma unroll
                for (int other = 1; other < SUMMED / SHARED; other *= 2)
                    score += __shfl_xor_sync(~0u, score, other);
                s[i / 2][2 * tile + i % 2] = score;
            }
        }
        float m[SETS];
        bool is_more = false;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            float* const of_set = s[set];
            if (call.softcap > 0.0f)
#pragma unroll
                for (int i = 0; i < 2 * TILES; ++i) of_set[i] = cap(of_set[i]);
            if (first <= length - call.window || first + POSITIONS > length + 1)
#pragma unroll
                for (int i = 0; i < 2 * TILES; ++i) {
                    const int ahead = first + 8 * i + g - length;
                    if (ahead > 0 || ahead <= -call.window) of_set[i] = HIDDEN;
                }
            m[set] = of_set[0];
#pragma unroll
            for (int i = 1; i < 2 * TILES; ++i) m[set] = fmaxf(m[set], of_set[i]);
            is_more |= m[set] > most[set];
        }
        if (__any_sync(~0u, is_more))
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                for (int other = 4; other < 32; other *= 2)
                    m[set] = fmaxf(m[set], __shfl_xor_sync(~0u, m[set], other));
                m[set] = fmaxf(m[set], most[set]);
                const float shrink = power(most[set] - m[set]);
                most[set] = m[set], total[set] *= shrink;
#pragma unroll
                for (int i = 0; i < 4 * BLOCKS; ++i) o[set][i / 4][i % 4] *= shrink;
#pragma unroll
                for (int i = 0; i < 4; ++i) excess[set][i] *= shrink;
            }
        stage += VALUES_AT;
        const u32 value_at = shared_address(stage) + Values::place(lane);
        const u32 scales_at =
            shared_address(stage) + lane % POSITIONS * Values::ROW + Values::BYTES;
        constexpr int EIGHTS = COPIED * RUNS > 8 ? 2 : 1;
        u32 scales[EIGHTS][4];  // of 2 t and 2 t + 1 of eight positions, run g; others are unused
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) words_of<true>(scales[i], scales_at + 16 * i);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                u32 scaled[OPERANDS][2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float p = power(s[set][2 * tile + i] - most[set]);
                    total[set] += p;
                    const u32 b = turned_matrix(halves(p, p));
#pragma unroll
                    for (int operand = 0; operand < OPERANDS; ++operand) {
                        u32 scale = scales[set * EIGHTS / SETS][2 * tile + i];
                        if constexpr (COLUMNS > HEADS) {
                            const int run =
                                (first_head + set) * RUNS + SCALED * operand + g % SCALED;
                            scale = __shfl_sync(~0u, scale, 4 * run + t);
                        }
                        scaled[operand][i] = times(b, scale);
                    }
                }
#pragma unroll
                for (int operand = 0; operand < OPERANDS; ++operand) {
                    const u32 one = twice(0x8000 | VALUE_CENTER);  // minus the center
                    const u32 a[4] = {operand ? 0 : one, operand ? one : 0, operand ? 0 : one,
                                      operand ? one : 0};
                    mma(excess[set], a, scaled[operand][0], scaled[operand][1]);
                }
#pragma unroll
                for (int head = 0; head < SHARED; ++head) {
                    const u32 head_at = value_at + 16 * tile * Values::ROW +
                                        (first_head + SHARED * set + head) *
                                            (Values::BYTES / COPIED);
                    const bool is_own = SHARED == 1 || g / 4 == head;  // other columns add zeros
                    Words<VE, true> chunks;
                    u32 words[4];
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block) {
                        constexpr int TOGETHER = Values::PAIRS;
                        if (block % TOGETHER == 0) chunks.read(words, head_at, block / TOGETHER);
                        u32 a[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int pair = block % TOGETHER * 2 + i % 2;
                            a[i] = codes(words[2 * (pair / Values::PAIRS) + i / 2],
                                         pair % Values::PAIRS);
                        }
                        const u32* const b = scaled[block / 2 / SCALED];
                        mma(o[set][block], a, is_own ? b[0] : 0, is_own ? b[1] : 0);
                    }
                }
            }
    }

    // Pair j of a word as two of fp16's least numbers times the codes, or 16 times the codes.
    __device__ __forceinline__ static u32 codes(u32 word, int j) {
        if constexpr (read_as<VE>() == ROTATED_8) return __byte_perm(word, 0, j ? 0x4341 : 0x4240);
        return (j < 2 ? word : word >> 8) & twice(0xf << 4 * (j % 2));
    }

    __device__ __forceinline__ void leave(float* maxima, float* totals) {
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            for (int other = 4; other < 32; other *= 2)
                total[set] += __shfl_xor_sync(~0u, total[set], other);
            const int column = set * (COLUMNS / SETS) + t / LANES;
            if (g == 0 && t % LANES == 0) maxima[column] = most[set], totals[column] = total[set];
        }
    }

    // Store the sums (COLUMNS, WIDTH + 1) relative to the maxima of all warps.
    // maxima: of each warp, `apart` from the next one's
    __device__ __forceinline__ void store(float* to, const float* maxima, int apart, int warps,
                                          int count) const {
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const int column = set * (COLUMNS / SETS) + t / LANES;
            float m = NOTHING;
            for (int w = 0; w < warps; ++w) m = fmaxf(m, maxima[w * apart + column]);
            if (column >= count) continue;
            const float shrink = power(most[set] - m) / CODE_UNIT;
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                const int run = i / 4, part = run % SCALED;
                const float times = VE == ROTATED_4 && i % 2 ? 16.0f : 1.0f;  // see `codes`
                const float sum = o[set][i / 2][i % 2 * 2 + part % 2];
                const float minus = excess[set][run / SCALED * 2 + part % 2];
                if (t % LANES == part / 2)
                    to[column * (WIDTH + 1) + Values::summed(i, g)] =
                        (sum / times + minus) * shrink;
            }
        }
    }
};

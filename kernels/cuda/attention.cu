// Attention of one new token per sequence to a paged cache, which is read as it is stored. Each CTA
// handles a part of a sequence's positions, one key head and up to 8 of its query heads; its warps
// take 16 or 32 positions at a time. The first operand of the tensor cores has positions as rows,
// later elements of values; heads are the columns of the second. Code offsets and scales of keys
// are applied to the scores, scales of values to the weights. Rotated elements are never rotated
// back: the queries, and the sum of the values, are rotated once. If angles are given, the kernel
// also rotates the queries and the new key by position, and stores the new key and value.
#include "packed.cuh"
#include "cache_tiles.cuh"
#include "early.cuh"
#include "attention_parts.cuh"

#define HIDDEN -1e30f  // less than NOTHING, so that its weight is 0 even if no position is visible
#define LOG2_E 1.44269504f

// Scores in base-2 exponents, capped to softcap · tanh(s / softcap).
struct Cap {
    float most, slope;

    __device__ __forceinline__ Cap(float softcap)
        : most(softcap * LOG2_E), slope(__fdividef(2.0f, softcap)) {}
    __device__ __forceinline__ float operator()(float s) const {
        return most - __fdividef(2.0f * most, 1.0f + power(s * slope));
    }
};

// Reads WIDTH elements per slot; the head's own begin at `offset`.
template <int WIDTH, int KE, int VE>
__global__ void __launch_bounds__(32 * ATTENTION_WARPS, WIDTH < 256 ? 2 : 1)
    attend(const __grid_constant__ Call call) {
    using Keys = Tiles<WIDTH, KE>;
    using Values = Tiles<WIDTH, VE>;
    constexpr int POSITIONS = 32 * (Keys::BYTES + Values::BYTES) <= ATTENTION_STEP ? 32 : 16;
    constexpr int VALUES_AT = POSITIONS * Keys::ROW, STAGE = VALUES_AT + POSITIONS * Values::ROW;
    constexpr int BLOCKS = WIDTH / 16, PAIRS = WIDTH / 8, RUNS = WIDTH / 32;
    constexpr int PART = HEADS * (WIDTH + 2);
    static_assert(STAGE >= HEADS * WIDTH * 4, "a warp's sums are where its stages were");
    extern __shared__ __align__(16) byte ring[];
    __shared__ float window[HEADS + 2][WIDTH];  // queries, new key, new value
    __shared__ __align__(16) u32 queries[HEADS][WIDTH / 2 + 4];  // pairs as a lane holds them
    __shared__ float maxima[ATTENTION_WARPS][HEADS], totals[ATTENTION_WARPS][HEADS];
    __shared__ float selves[HEADS];  // scores of the new key
    __shared__ int before;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int warps = blockDim.x / 32, dim = call.head_dim;
    const int split = blockIdx.x, kv = blockIdx.y / call.parts, part = blockIdx.y % call.parts;
    const int row = blockIdx.z, group = call.heads / call.kv_heads;
    const int heads = min(HEADS, group - part * HEADS);
    const int width = call.kv_heads * dim, offset = kv * dim % 64;
    const int first_element = kv * dim - offset;
    const u32 padded = (width + 63) / 64 * 64;
    const Keys keys(call.keys, padded, first_element, offset, offset + dim, lane);
    const Values values(call.values, padded, first_element, offset, offset + dim, lane);
    let_the_next_begin();
    wait_for_input();
    const int length = call.lengths[row], from = call.window ? max(0, length + 1 - call.window) : 0;
    const int steps = (length + POSITIONS - 1) / POSITIONS, first = from / POSITIONS;
    const int each = (steps - first + call.splits - 1) / call.splits;
    const int begin = first + split * each, end = min(steps, begin + each);
    const int* table = call.tables + (integer)row * call.pages;
    byte* const own = ring + warp * call.stages * STAGE;
    int pages = 0;  // for step `lane` of 32
    auto fetch = [&](int i, const byte* to) {
        const int step = begin + warp + i * warps;
        if (step < end) {
            if (i % 32 == 0) {
                const int of_lane = step + lane * warps;
                pages = of_lane < end ? table[of_lane * POSITIONS / PAGE_TOKENS] : 0;
            }
            const u32 page = __shfl_sync(~0u, pages, i % 32);
            const u32 slot = page * PAGE_TOKENS + step * POSITIONS % PAGE_TOKENS;
            const int left = length - step * POSITIONS;
            keys.template begin<POSITIONS>(shared_address(to), slot, left, lane);
            values.template begin<POSITIONS>(shared_address(to) + VALUES_AT, slot, left, lane);
        }
        end_step();
    };
    for (int i = 0; i < call.stages; ++i) fetch(i, own + i * STAGE);
    const integer own_q = ((integer)row * call.heads + kv * group + part * HEADS) * dim;
    const integer new_row = (integer)row * width;
    for (int i = threadIdx.x; i < (heads + 2) * WIDTH; i += blockDim.x) {
        const int head = i / WIDTH;
        int e = i % WIDTH - offset;
        float value = 0.0f;
        if (head < heads) {
            if (e >= 0 && e < dim) value = call.rotated(call.q + own_q + head * dim, e, row);
        } else if (e < width - kv * dim) {
            int of = kv;  // a unit of 64 may include elements of other heads
            for (; e < 0; e += dim) --of;
            for (; e >= dim; e -= dim) ++of;
            const integer at = new_row + of * dim;
            value = head == heads ? call.rotated(call.k + at, e, row) : from_half(call.v[at + e]);
        }
        window[head][i % WIDTH] = value;
    }
    __syncthreads();
    const float *new_key = window[heads], *new_value = window[heads + 1];
    if (split == 0 && part == 0 && call.slots)
        for (int i = warp; i < WIDTH / 32; i += warps) {  // units of the key, then of the value
            const bool is_key = i < WIDTH / 64;
            const int unit = i % (WIDTH / 64) * 64;
            if (unit < offset || unit >= offset + dim) continue;  // begins in another head
            const float* from = (is_key ? new_key : new_value) + unit + 2 * lane;
            const half_bits two[2] = {to_half(from[0]), to_half(from[1])};
            const integer at = call.slots[row] * padded + first_element + unit + 2 * lane;
            store(is_key ? call.keys : call.values, is_key ? KE : VE, at, two, lane);
        }
    const Cap cap(call.softcap);
    const float scale = call.scale * LOG2_E;
    for (int head = warp; head < heads; head += warps) {
        float s = 0.0f;  // score of the new key
        for (int i = lane; i < WIDTH; i += 32) s += window[head][i] * new_key[i];
        for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
        s *= scale;
        if (call.softcap > 0.0f) s = cap(s);
        if (lane == 0) selves[head] = s;
        if constexpr (is_rotated<KE>())
            for (int unit = 0; unit < WIDTH; unit += 64) {
                float* two = window[head] + unit + 2 * lane;
                float turned[2] = {two[0], two[1]};
                rotate(turned, lane);
                two[0] = turned[0], two[1] = turned[1];
            }
        __syncwarp();
        const float factor = scale / (is_rotated<KE>() ? 32.0f : 1.0f);  // H₃₂ twice is 32
        for (int i = lane; i < WIDTH / 2; i += 32) {
            const int of = i / PAIRS, pair = i % PAIRS;
            queries[head][i] = halves(window[head][Keys::first_of(pair, of)] * factor,
                                      window[head][Keys::second_of(pair, of)] * factor);
        }
    }
    __syncthreads();
    u32 q[PAIRS];  // of head g
#pragma unroll
    for (int i = 0; i < PAIRS; i += 4) {
        uint4 v = {0, 0, 0, 0};
        if (g < heads) v = *(const uint4*)(queries[g] + t * PAIRS + i);
        q[i] = v.x, q[i + 1] = v.y, q[i + 2] = v.z, q[i + 3] = v.w;
    }
    float bases[RUNS][4] = {};  // minus the codes' offset, for heads 2 t and 2 t + 1
    if constexpr (is_rotated<KE>())
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const u32 low = center<KE>(0) ^ 0x80008000u, high = center<KE>(1) ^ 0x80008000u;
            const u32 a[4] = {low, low, high, high};
            mma(bases[block / 2], a, q[2 * block], q[2 * block + 1]);
        }

    float o[BLOCKS][4] = {}, most[2] = {NOTHING, NOTHING}, total[2] = {};
    auto add = [&](const byte* stage, int step) {
        float s[POSITIONS / 16][4];  // positions g and 8 + g, heads 2 t and 2 t + 1
        const u32 key_at = shared_address(stage) + Keys::place(lane);
#pragma unroll
        for (int tile = 0; tile < POSITIONS / 16; ++tile) {
            u32 scales[2][RUNS / 2];
            float sums[2][4] = {};
            if constexpr (is_rotated<KE>())
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    Keys::read_scales(scales[i], stage + (16 * tile + 8 * i + g) * Keys::ROW);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[tile][i] = 0.0f;
            u32 words[4];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                constexpr int TOGETHER = Keys::PAIRS;  // blocks per two chunks
                if (block % TOGETHER == 0)
                    words_of<false>(words, key_at + 16 * tile * Keys::ROW + block / TOGETHER * 32);
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i] = Keys::element(words, block % TOGETHER * 2 + i / 2, i % 2);
                const u32* b = q + 2 * block;
                if constexpr (!is_rotated<KE>()) {
                    mma(sums[block % 2], a, b[0], b[1]);
                } else if (block % 2 == 0) {
                    mma_onto(sums[0], a, b, bases[block / 2]);
                } else {
                    mma(sums[0], a, b[0], b[1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const u32 two = scales[i / 2][block / 4];
                        s[tile][i] += sums[0][i] * from_half(two >> 16 * (block / 2 % 2));
                    }
                }
            }
            if constexpr (!is_rotated<KE>())
#pragma unroll
                for (int i = 0; i < 4; ++i) s[tile][i] = sums[0][i] + sums[1][i];
        }
        if (call.softcap > 0.0f)
#pragma unroll
            for (int i = 0; i < POSITIONS / 4; ++i) s[i / 4][i % 4] = cap(s[i / 4][i % 4]);
        if (step * POSITIONS < from || (step + 1) * POSITIONS > length)
#pragma unroll
            for (int i = 0; i < POSITIONS / 4; ++i) {
                const int position = step * POSITIONS + i / 2 * 8 + g;
                if (position < from || position >= length) s[i / 4][i % 4] = HIDDEN;
            }
        float m[2] = {s[0][0], s[0][1]};
#pragma unroll
        for (int i = 2; i < POSITIONS / 4; ++i) m[i % 2] = fmaxf(m[i % 2], s[i / 4][i % 4]);
        if (__any_sync(~0u, m[0] > most[0] || m[1] > most[1]))
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                for (int other = 4; other < 32; other *= 2)
                    m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], other));
                m[h] = fmaxf(m[h], most[h]);
                const float shrink = power(most[h] - m[h]);
                most[h] = m[h], total[h] *= shrink;
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
                    o[block][h] *= shrink, o[block][2 + h] *= shrink;
            }
        stage += VALUES_AT;
        const u32 value_at = shared_address(stage) + Values::place(lane);
#pragma unroll
        for (int tile = 0; tile < POSITIONS / 16; ++tile) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = power(s[tile][i] - most[i % 2]);
                total[i % 2] += p[i];
            }
            // weights of positions 2 t and 2 t + 1, and 8 after them, for head g
            const u32 b[2] = {turned_matrix(halves(p[0], p[1])), turned_matrix(halves(p[2], p[3]))};
            u32 scaled[RUNS][2];
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
                    scaled[run][i] =
                        is_rotated<VE>()
                            ? times(b[i], __byte_perm(even[run / 2], odd[run / 2],
                                                      run % 2 ? 0x7632 : 0x5410))
                            : b[i];
            }
            u32 words[4];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                constexpr int TOGETHER = Values::PAIRS;
                if (block % TOGETHER == 0)
                    words_of<true>(words,
                                   value_at + 16 * tile * Values::ROW + block / TOGETHER * 32);
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int pair = block % TOGETHER * 2 + i % 2;
                    a[i] = Values::element(words, pair, i / 2);
                    if constexpr (is_rotated<VE>()) a[i] = less(a[i], center<VE>(pair % 2));
                }
                mma(o[block], a, scaled[block / 2][0], scaled[block / 2][1]);
            }
        }
    };
    const byte* stage = own;
    int ahead = call.stages;
    for (int step = begin + warp; step < end; step += warps) {
        wait_for_step(call.stages - 1);
        add(stage, step);
        __syncwarp();
        fetch(ahead++, stage);
        stage = stage + STAGE == own + call.stages * STAGE ? own : stage + STAGE;
    }

    // o[block]: heads 2 t and 2 t + 1 of row 2 block, then of row 2 block + 1
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        for (int other = 4; other < 32; other *= 2)
            total[h] += __shfl_xor_sync(~0u, total[h], other);
        if (g == 0) maxima[warp][2 * t + h] = most[h], totals[warp][2 * t + h] = total[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = 2 * t + h;
        float m = NOTHING;
        for (int w = 0; w < warps; ++w) m = fmaxf(m, maxima[w][head]);
        const float shrink = power(most[h] - m);
        if (head >= heads) continue;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i)
            ((float*)own)[head * WIDTH + Values::summed(i, g)] = o[i / 2][i % 2 * 2 + h] * shrink;
    }
    __syncthreads();
    const integer place = (integer)row * gridDim.y + blockIdx.y;
    float* const parts = call.partial + place * call.splits * PART;
    float* const of_split = parts + split * PART;
    for (int i = threadIdx.x; i < heads * WIDTH; i += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < warps; ++w)
            sum += ((const float*)(ring + w * call.stages * STAGE))[i];
        __stcg(of_split + i, sum);
    }
    if (threadIdx.x < heads) {
        float m = NOTHING, l = 0.0f;
        for (int w = 0; w < warps; ++w) m = fmaxf(m, maxima[w][threadIdx.x]);
        for (int w = 0; w < warps; ++w)
            l += totals[w][threadIdx.x] * power(maxima[w][threadIdx.x] - m);
        __stcg(of_split + HEADS * WIDTH + threadIdx.x, m);
        __stcg(of_split + HEADS * (WIDTH + 1) + threadIdx.x, l);
    }
    if (call.splits > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) before = atomicAdd(call.arrived + place, 1);
        __syncthreads();
        if (before < call.splits - 1) return;
        __threadfence();
        if (threadIdx.x == 0) call.arrived[place] = 0;
    } else {
        __syncthreads();
    }
    add_parts<WIDTH, is_rotated<VE>()>(call, parts, heads, selves, window, own_q, offset);
}

// Store keys or values x fp16 (t, width) at slots int64 (t,), like `torch_cache.encode`; each warp
// has 64 elements. element: as above.
extern "C" __global__ void write_rows(const half_bits* x, const integer* slots, byte* data,
                                      half_bits* scales, integer width, integer element) {
    const int lane = threadIdx.x % 32, unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const integer padded = (width + 63) / 64 * 64, at = unit * 64 + 2 * lane;
    if (unit * 64 >= padded) return;
    half_bits two[2];
    for (int i = 0; i < 2; ++i) two[i] = at + i < width ? x[blockIdx.x * width + at + i] : 0;
    store({data, scales}, element, slots[blockIdx.x] * padded + at, two, lane);
}

// The inverse: read slots int64 (t,) into x fp16 (t, width).
extern "C" __global__ void read_rows(half_bits* x, const integer* slots, byte* data,
                                     half_bits* scales, integer width, integer element) {
    const int lane = threadIdx.x % 32, unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const integer padded = (width + 63) / 64 * 64, at = unit * 64 + 2 * lane;
    if (unit * 64 >= padded) return;
    half_bits two[2];
    load({data, scales}, element, slots[blockIdx.x] * padded + at, two, lane);
    half_bits* out = x + blockIdx.x * width + at;
    if (width % 2 == 0 && at < width) {
        *(u32*)out = two[0] | (u32)two[1] << 16;
    } else {
        for (int i = 0; i < 2; ++i)
            if (at + i < width) out[i] = two[i];
    }
}

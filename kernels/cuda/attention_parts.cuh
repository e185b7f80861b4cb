// The arguments of attention, and the reduction over all parts of a sequence's positions.

#define HEADS ATTENTION_HEADS
#define NOTHING -1e28f

// Multiply the even and the odd places of 64 numbers by H₃₂; a lane has two adjacent ones.
__device__ __forceinline__ void rotate(float* two, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int s = 1; s < 32; s <<= 1) {
            const float other = __shfl_xor_sync(~0u, two[i], s);
            two[i] = lane & s ? other - two[i] : two[i] + other;
        }
}

struct Call {  // fp16: q, out (b, heads, head_dim); k, v (b, kv_heads, head_dim) of the new token
    const half_bits *q, *k, *v;
    Rows keys, values;
    const int *tables, *lengths;  // (b, pages); (b,)
    float* partial;               // (b, kv_heads, parts, splits, HEADS, WIDTH + 2)
    int* arrived;                 // (b, kv_heads, parts), zero before and after
    half_bits* out;
    const float *cosines, *sines;  // (b or 1, half), of the new positions; or null
    const integer* slots;          // (b), where the new keys and values are stored
    int heads, kv_heads, parts;    // parts: CTAs that share the query heads of a key head
    int head_dim, pages, splits, stages;  // stages: steps that a warp has in flight
    int window;                           // 0: none
    int half, angle_step;                 // angle_step: from one sequence to the next
    float scale, softcap;                 // softcap 0: none

    // Element i of a head, rotated by its position if there are angles.
    __device__ __forceinline__ float rotated(const half_bits* x, int i, int row) const {
        const float value = from_half(x[i]);
        if (!cosines || i >= 2 * half) return value;
        const float other = from_half(x[i < half ? i + half : i - half]);
        const int angle = row * angle_step + i % half;
        const float c = __fmul_rn(value, cosines[angle]), s = __fmul_rn(other, sines[angle]);
        return from_half(to_half(i < half ? __fsub_rn(c, s) : __fadd_rn(c, s)));
    }
};

// Add up the parts (splits, HEADS · WIDTH sums of values, HEADS maxima, HEADS totals) and the new
// token, by one CTA. selves: scores of its key; window: scratch, then, after HEADS rows, its key
// and value.
template <int WIDTH, bool IS_ROTATED>
__device__ __forceinline__ void add_parts(const Call& call, const float* parts, int heads,
                                          const float* selves, float (*window)[WIDTH],
                                          integer out_at, int offset) {
    constexpr int PART = HEADS * (WIDTH + 2);
    __shared__ float weights[HEADS][33];  // of the parts, then of the new token
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float early[4];  // of the first parts, which are all for short sequences
    auto begin_sum = [&](int i) {
#pragma unroll
        for (int from = 0; from < 4; ++from)
            early[from] = from < call.splits ? __ldcg(parts + from * PART + i) : 0.0f;
    };
    begin_sum(threadIdx.x);
    for (int head = warp; head < heads; head += warps) {  // lane i has part i
        const float* of_lane = parts + lane * PART + HEADS * WIDTH + head;
        const float part_most = lane < call.splits ? __ldcg(of_lane) : NOTHING;
        const float part_total = lane < call.splits ? __ldcg(of_lane + HEADS) : 0.0f;
        float m = fmaxf(selves[head], part_most);
        for (int other = 16; other; other >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, other));
        const float weight = power(part_most - m), self = power(selves[head] - m);
        float l = weight * part_total;
        for (int other = 16; other; other >>= 1) l += __shfl_xor_sync(~0u, l, other);
        l += self;
        weights[head][lane] = weight * (IS_ROTATED ? 1.0f / 32.0f : 1.0f) / l;
        if (lane == 0) weights[head][32] = self / l;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * WIDTH; i += blockDim.x) {
        const float* of_head = weights[i / WIDTH];
        float sum = 0.0f;
#pragma unroll
        for (int from = 0; from < 4; ++from) sum += of_head[from] * early[from];
#pragma unroll 4
        for (int from = 4; from < call.splits; ++from)
            sum += of_head[from] * __ldcg(parts + from * PART + i);
        window[i / WIDTH][i % WIDTH] = sum;
        if (i + blockDim.x < heads * WIDTH) begin_sum(i + blockDim.x);
    }
    __syncthreads();
    for (int i = warp; i < heads * (WIDTH / 64); i += warps) {
        const int head = i / (WIDTH / 64), at = i % (WIDTH / 64) * 64 + 2 * lane, e = at - offset;
        float two[2] = {window[head][at], window[head][at + 1]};
        if constexpr (IS_ROTATED) rotate(two, lane);
        const float self = weights[head][32], *new_value = window[heads + 1] + at;
        if (e >= 0 && e < call.head_dim)
            *(u32*)(call.out + out_at + head * call.head_dim + e) =
                halves(two[0] + self * new_value[0], two[1] + self * new_value[1]);
    }
}

// The arguments of attention, and the reduction over all parts of a sequence's positions.

#define NOTHING -1e28f
#define LOG2_E 1.44269504f
#define HIDDEN -1e30f  // less than NOTHING, so that its weight is 0 even if no position is visible

// What an element rotated by position is made of. All of it is loaded, whatever the kind, because
// loads without branches wait for each other only once.
enum Kind { NO_ELEMENT, NOT_ROTATED, FIRST, SECOND };
struct Source {
    const half_bits* x;
    int other, angle;  // from x to the other element of its pair; of the angle
    Kind kind;
};
struct Loaded {
    half_bits x, other;
    float cosine, sine;

    __device__ __forceinline__ float rotated(Kind kind) const {  // exact in fp16
        if (kind == NO_ELEMENT) return 0.0f;
        if (kind == NOT_ROTATED) return from_half(x);
        const float c = __fmul_rn(from_half(x), cosine), s = __fmul_rn(from_half(other), sine);
        return from_half(to_half(kind == FIRST ? __fsub_rn(c, s) : __fadd_rn(c, s)));
    }
};

struct Call {  // fp16: q, out (b, apart, heads, head_dim); k, v (b, apart, kv_heads, head_dim)
    const half_bits *q, *k, *v;  // before rotation, of the launch's first token
    Rows keys, values;
    const int *tables, *lengths;  // (b, pages); (b,), positions before all new ones
    float* partial;               // (b, kv_heads, parts, splits, COLUMNS, WIDTH + 4)
    int* arrived;                 // (b, kv_heads, parts), zero before and after
    half_bits* out;
    const int* to;  // (heads · head_dim), place of each element in a token's row of out; or null
    const float *cosines, *sines;  // (b or 1, apart, half), of the new positions
    const integer* slots;          // (b, apart), where the new keys and values are stored
    const float* sinks;            // (heads), scores without a value; or null
    int tokens, heads, kv_heads;
    int parts;                            // CTAs that share the columns of a key head
    int head_dim, pages, splits, stages;  // stages: steps that a warp has in flight
    int window;                           // positions that a token sees, its own included
    int half, angle_step;                 // angle_step: from one sequence to the next
    int interleaved;                      // pairs are neighbours in x, and apart once rotated
    float scale, softcap;                 // softcap 0: none
    int apart, after;  // tokens from one sequence to the next; new ones of launches before

    // Element i of a head x.
    __device__ __forceinline__ Source source(const half_bits* x, int i, int row, int token) const {
        if (i >= 2 * half) return {x + i, 0, 0, NOT_ROTATED};
        const bool is_first = i < half;
        const int pair = is_first ? i : i - half, to_other = interleaved ? 1 : half;
        const int angle = row * angle_step + token * half + pair;
        const half_bits* const at = x + (interleaved ? 2 * pair + !is_first : i);
        return {at, is_first ? to_other : -to_other, angle, is_first ? FIRST : SECOND};
    }
    __device__ __forceinline__ Loaded loaded(const Source& of) const {
        return {*of.x, of.x[of.other], cosines[of.angle], sines[of.angle]};
    }
};

// Scores in base-2 exponents, capped to softcap · tanh(s / softcap).
struct Cap {
    float most, slope;

    __device__ __forceinline__ Cap(float softcap)
        : most(softcap * LOG2_E), slope(__fdividef(2.0f, softcap)) {}
    __device__ __forceinline__ float operator()(float s) const {
        return most - __fdividef(2.0f * most, 1.0f + power(s * slope));
    }
};

// A CTA's columns: a query head of a new token each, all heads of a token before the next token.
template <int TOKENS> struct Columns {
    int first, count, group, apart;  // apart: heads from one token's group to the next one's

    __device__ __forceinline__ int token(int column) const {
        return TOKENS == 1 ? 0 : (first + column) / group;
    }
    // The head to which a column belongs, counted from the first head of the group and sequence.
    __device__ __forceinline__ int head(int column) const {
        return first + column + token(column) * apart;
    }
    __device__ __forceinline__ int in_group(int column) const { return (first + column) % group; }
};

// Prefetch to L2 the places of a group's elements, which are constant.
__device__ __forceinline__ void prefetch_places(const Call& call, int first, int count) {
    for (int i = threadIdx.x * 32; call.to && i < count; i += blockDim.x * 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(call.to + first + i));
}

// Of a part: sums of values (COLUMNS, WIDTH), maxima, totals; whole pieces of 16 bytes.
template <int WIDTH, int COLUMNS> __host__ __device__ constexpr int part_floats() {
    return COLUMNS * (WIDTH + 4);
}

// Adjacent floats that a thread loads at once.
template <int COUNT> struct __align__(4 * COUNT) Floats { float x[COUNT]; };
template <int COUNT> __device__ __forceinline__ Floats<COUNT> load_floats(const float* at) {
    Floats<COUNT> f;
    if constexpr (COUNT == 4) {
        const float4 v = __ldcg((const float4*)at);
        f.x[0] = v.x, f.x[1] = v.y, f.x[2] = v.z, f.x[3] = v.w;
    } else if constexpr (COUNT == 2) {
        const float2 v = __ldcg((const float2*)at);
        f.x[0] = v.x, f.x[1] = v.y;
    } else {
        f.x[0] = __ldcg(at);
    }
    return f;
}

// Add up the parts by one CTA. out: of the sequence; window: scratch.
template <int WIDTH, int COLUMNS, int MOST_THREADS, bool IS_ROTATED, int TOKENS>
__device__ __forceinline__ void add_parts(const Call& call, const float* parts,
                                          const Columns<TOKENS>& columns, half_bits* out,
                                          float (*window)[WIDTH], int offset) {
    constexpr int PART = part_floats<WIDTH, COLUMNS>();
    constexpr int EACH = COLUMNS * WIDTH / MOST_THREADS;  // sums of a thread
    constexpr int ADJACENT = EACH >= 4 ? 4 : EACH >= 2 ? 2 : 1;
    constexpr int AHEAD = ADJACENT == 4 ? 16 : 32;  // parts loaded together
    __shared__ float weights[COLUMNS][32];  // of the parts
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int sums = columns.count * WIDTH;  // may be fewer than threads
    const int first_head = blockIdx.y / call.parts * columns.group;
    auto element = [&](int i) { return i % (WIDTH / 64) * 64 + 2 * lane - offset; };
    auto places_of = [&](int i) {  // of two elements
        const int column = i / (WIDTH / 64), e = element(i);
        if (!call.to || column >= columns.count || e < 0 || e >= call.head_dim) return int2{0, 0};
        const int head = first_head + columns.in_group(column);
        return __ldg((const int2*)(call.to + head * call.head_dim + e));
    };
    int2 next = places_of(warp);
    auto weigh = [&] {
#pragma unroll 1
        for (int column = warp; column < columns.count; column += warps) {  // lane i has part i
            const float* of_lane = parts + lane * PART + COLUMNS * WIDTH + column;
            const float part_most = lane < call.splits ? __ldcg(of_lane) : NOTHING;
            const float part_total = lane < call.splits ? __ldcg(of_lane + COLUMNS) : 0.0f;
            float m = part_most;
            for (int other = 16; other; other >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, other));
            float sink = NOTHING;
            if (call.sinks) {
                sink = call.sinks[first_head + columns.in_group(column)] * LOG2_E;
                m = fmaxf(m, sink);
            }
            const float weight = power(part_most - m);
            float l = weight * part_total;
            for (int other = 16; other; other >>= 1) l += __shfl_xor_sync(~0u, l, other);
            if (call.sinks) l += power(sink - m);
            weights[column][lane] = weight * (IS_ROTATED ? 1.0f / 32.0f : 1.0f) / l;
        }
    };
#pragma unroll 1
    for (int base = 0; base < sums; base += blockDim.x * ADJACENT) {
        const int i = base + threadIdx.x * ADJACENT;
        float sum[ADJACENT] = {};
#pragma unroll 1
        for (int from = 0; from < call.splits; from += AHEAD) {
            const int count = i < sums ? call.splits - from : 0;
            const float* at = parts + from * PART + i;
            Floats<ADJACENT> ahead[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; ++j)
                if (j < count) ahead[j] = load_floats<ADJACENT>(at + j * PART);
            if (base + from == 0) {
                weigh();
                __syncthreads();
            }
            const float* of_parts = weights[i / WIDTH] + from;
#pragma unroll
            for (int j = 0; j < AHEAD; ++j)
                if (j < count)
#pragma unroll
                    for (int k = 0; k < ADJACENT; ++k) sum[k] += of_parts[j] * ahead[j].x[k];
        }
        if (i < sums)
#pragma unroll
            for (int k = 0; k < ADJACENT; ++k) window[0][i + k] = sum[k];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < columns.count * (WIDTH / 64); i += warps) {
        const int column = i / (WIDTH / 64), e = element(i);
        const int2 places = next;
        next = places_of(i + warps);
        float two[2] = {window[column][e + offset], window[column][e + offset + 1]};
        if constexpr (IS_ROTATED) rotate_unit(two, lane);
        if (e < 0 || e >= call.head_dim) continue;
        const u32 pair = halves(two[0], two[1]);
        if (call.to) {
            half_bits* const row = out + columns.token(column) * call.heads * call.head_dim;
            row[places.x] = (half_bits)pair, row[places.y] = (half_bits)(pair >> 16);
        } else {
            *(u32*)(out + (first_head + columns.head(column)) * call.head_dim + e) = pair;
        }
    }
}

// The gated delta rule for a few new tokens of each text; see `delta_step` of reference/delta.py.
#include "exl2.cuh"
#include "early.cuh"
#include "delta.cuh"

constexpr int PARTS = 2, ROWS = DIM / PARTS;  // threads of a column, and its keys that each has
constexpr int THREADS = PARTS * DIM, WARPS = THREADS / 32;

// Scale rows of DIM numbers in shared memory by the inverse of their length.
__device__ __forceinline__ void to_unit_length(float* x, float factor, int lane) {
    float square = 0.0f;
    for (int i = lane; i < DIM; i += 32) square += x[i] * x[i];
    const float size = rsqrtf(sum_of_warp(square) + TINY) * factor;
    for (int i = lane; i < DIM; i += 32) x[i] *= size;
}

// A CTA has a value head, blockIdx.x, of a text, blockIdx.y. A thread has a column of the state, and
// half of its rows. No CTA reads what another one of the launch writes: inputs of the convolution
// that heads share are written elsewhere in their ring. to: the place of each result in a token's row
// of y, or null; count: tokens of each text, at most TOKENS. Registers leave room for two CTAs on a
// multiprocessor, however many tokens are pending.
template <int TOKENS>
__global__ void __launch_bounds__(THREADS, 2)
delta_step(const half_bits* x, const half_bits* qkv, const half_bits* z, half_bits* y,
           const int* to, const int* lengths, const float* conv, const float* decay,
           const float* step, const float* maps, const float* norm, float* states, int* behinds,
           float* keys, float* deltas, float* decays, half_bits* inputs, float* asides,
           half_bits* aside_inputs, int* aside_at, integer count, integer hidden, integer key_heads,
           float eps) {
    __shared__ float q[TOKENS][DIM], k[TOKENS][DIM], v[TOKENS][DIM];
    __shared__ float pending_keys[STEP_TOKENS][DIM];
    __shared__ float by_key[PARTS][DIM], by_query[PARTS][DIM];
    __shared__ float logs[TOKENS], betas[TOKENS], shares[TOKENS][2][WARPS];
    const int head = blockIdx.x, text = blockIdx.y, heads = gridDim.x, thread = threadIdx.x;
    const int column = thread % DIM, part = thread / DIM, lane = thread % 32, warp = thread / 32;
    const int shared = heads / (int)key_heads, key_head = head / shared;
    const integer channels = (2 * key_heads + heads) * DIM, of_head = (integer)text * heads + head;
    overlap_launches();
    const int length = lengths[text], behind = behinds[of_head];
    const int pending = min(max(length - behind, 0), STEP_TOKENS);
    float* state = states + (of_head * DIM + part * ROWS) * DIM + column;
    float s[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) s[r] = state[r * DIM];

    const integer first = (integer)text * STEP_TOKENS;  // pending token of the text
    for (int i = part; i < pending; i += PARTS)
        pending_keys[i][column] = keys[((first + i) * heads + head) * DIM + column];

    for (int j = 0; j < count; ++j) {  // of β and the decay, a warp's share of the sums
        const half_bits* token = x + ((integer)text * count + j) * hidden;
        const float *to_gate = maps + head * hidden, *to_step = maps + (heads + head) * hidden;
        float sums[2] = {};
        for (integer i = 4 * thread; i < hidden; i += 4 * THREADS) {
            const uint2 bits = *(const uint2*)(token + i);
            const float4 a = *(const float4*)(to_gate + i), b = *(const float4*)(to_step + i);
            const float v[4] = {from_half(bits.x), from_half(bits.x >> 16), from_half(bits.y),
                                from_half(bits.y >> 16)};
            sums[0] += v[0] * a.x + v[1] * a.y + v[2] * a.z + v[3] * a.w;
            sums[1] += v[0] * b.x + v[1] * b.y + v[2] * b.z + v[3] * b.w;
        }
        for (int n = 0; n < 2; ++n) {
            const float sum = sum_of_warp(sums[n]);
            if (lane == 0) shares[j][n][warp] = sum;
        }
    }

    half_bits* ring = inputs + (integer)text * RING * channels;
    for (int i = thread; i < 3 * DIM; i += THREADS) {  // the convolution of q, k and v
        const int kind = i / DIM, c = i % DIM;
        const integer channel = channel_of(i, key_head, head, key_heads);
        float weights[TAPS], seen[TAPS];
#pragma unroll
        for (int t = 0; t < TAPS; ++t) weights[t] = conv[channel * TAPS + t];
#pragma unroll
        for (int t = 0; t < TAPS - 1; ++t) {
            const int at = length - (TAPS - 1) + t;
            seen[t] = at < 0 ? 0.0f : from_half(ring[at % RING * channels + channel]);
        }
        const bool writes = length >= behind && (kind == 2 || head % shared == 0);
        float (*out)[DIM] = kind == 0 ? q : kind == 1 ? k : v;
        for (int j = 0; j < count; ++j) {
            const half_bits bits = qkv[((integer)text * count + j) * channels + channel];
            if (writes) ring[(length + j) % RING * channels + channel] = bits;
            seen[TAPS - 1] = from_half(bits);
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) sum += seen[t] * weights[t];
            out[j][c] = silu(sum);
#pragma unroll
            for (int t = 0; t < TAPS - 1; ++t) seen[t] = seen[t + 1];
        }
    }
    __syncthreads();
    if (thread < count) {
        float sums[2] = {0.0f, step[head]};
        for (int n = 0; n < 2 * WARPS; ++n) sums[n / WARPS] += shares[thread][n / WARPS][n % WARPS];
        betas[thread] = step_size(sums[0]);
        logs[thread] = log_decay(sums[1], decay[head]);
    }
    for (int j = warp; j < 2 * count; j += WARPS)
        to_unit_length(j < count ? q[j] : k[j - count], j < count ? rsqrtf(DIM) : 1.0f, lane);

    for (int i = 0; i < pending; ++i) {
        const integer at = (first + i) * heads + head;
        const float kept = expf(decays[at]), delta = deltas[at * DIM + column];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            s[r] = s[r] * kept + pending_keys[i][part * ROWS + r] * delta;
        const int border = behind + i + 1;
        if (border % PAGE_TOKENS) continue;
        float* aside = asides + (of_head * DIM + part * ROWS) * DIM + column;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) aside[r * DIM] = s[r];
        for (int n = thread; n < 3 * DIM; n += THREADS) {
            if (n < 2 * DIM && head % shared) continue;
            const integer channel = channel_of(n, key_head, head, key_heads);
            for (int t = 0; t < TAPS - 1; ++t)
                aside_inputs[((integer)text * (TAPS - 1) + t) * channels + channel] =
                    ring[(border - (TAPS - 1) + t) % RING * channels + channel];
        }
        if (head == 0 && thread == 0) aside_at[text] = border;
    }
    if (pending) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) state[r * DIM] = s[r];
        if (thread == 0) behinds[of_head] = length;
    }
    __syncthreads();

    for (int j = 0; j < count; ++j) {
        const float kept = expf(logs[j]);
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            s[r] *= kept;
            sum += k[j][part * ROWS + r] * s[r];
        }
        by_key[part][column] = sum;
        __syncthreads();
        const float delta = betas[j] * (v[j][column] - (by_key[0][column] + by_key[1][column]));
        sum = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            s[r] += k[j][part * ROWS + r] * delta;
            sum += q[j][part * ROWS + r] * s[r];
        }
        by_query[part][column] = sum;
        const integer at = (first + j) * heads + head;
        if (part == 0) deltas[at * DIM + column] = delta;
        else keys[at * DIM + column] = k[j][column];
        if (thread == 0) decays[at] = logs[j];
        __syncthreads();
        if (part == 0) q[j][column] = by_query[0][column] + by_query[1][column];  // the output
    }
    __syncthreads();
    for (int j = warp; j < count; j += WARPS) {
        float square = 0.0f;
        for (int i = lane; i < DIM; i += 32) square += q[j][i] * q[j][i];
        const float size = rsqrtf(sum_of_warp(square) / DIM + eps);
        const integer row = ((integer)text * count + j) * heads * DIM;
        for (int i = lane; i < DIM; i += 32) {
            const int at = head * DIM + i;
            y[row + (to ? to[at] : at)] =
                to_half(q[j][i] * size * norm[i] * silu(from_half(z[row + at])));
        }
    }
}

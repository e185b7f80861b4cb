// What both forms of the gated delta rule share.

constexpr int DIM = 128, TAPS = 4;  // of heads, of the convolution

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float step_size(float to_gate) { return 1.0f / (1.0f + expf(-to_gate)); }

// The log of a token's decay: rate, -exp(A_log), times softplus(to_step).
__device__ __forceinline__ float log_decay(float to_step, float rate) {
    return rate * (to_step > 20.0f ? to_step : log1pf(expf(to_step)));
}

// Channel i of a head's queries, keys and values in turn, 3 · DIM, among those of all heads.
__device__ __forceinline__ integer channel_of(int i, int key_head, int head, integer key_heads) {
    const int kind = i / DIM;
    return (kind < 2 ? kind * key_heads + key_head : 2 * key_heads + head) * DIM + i % DIM;
}

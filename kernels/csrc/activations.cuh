// Activation functions of products by number, those of `ACTIVATIONS`.

enum { NO_ACTIVATION, ACTIVATIONS };

__device__ __forceinline__ float activated(int activation, float x) {
    switch (activation) {
        case SILU: return __fdividef(x, 1.0f + __expf(-x));
        case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        case GELU_TANH: return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
        case RELU: return x < 0.0f ? 0.0f : x;
        default: return x < 0.0f ? 0.0f : x * x;
    }
}

// (u + 1) · g · σ(slope · g) of g = min(gate, limit) and u = up within ± limit; NaN stay NaN.
__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
    gate = gate > SWIGLU_LIMIT ? SWIGLU_LIMIT : gate;
    up = up > SWIGLU_LIMIT ? SWIGLU_LIMIT : up < -SWIGLU_LIMIT ? -SWIGLU_LIMIT : up;
    return (up + 1.0f) * __fdividef(gate, 1.0f + __expf(-SWIGLU_SLOPE * gate));
}

// Activation functions of products, numbered from 1 in the order of `ACTIVATIONS`.

__device__ __forceinline__ float activated(int activation, float x) {
    switch (activation) {
        case 1: return __fdividef(x, 1.0f + __expf(-x));
        case 2: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        case 3: return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
        case 4: return x < 0.0f ? 0.0f : x;
        default: return x < 0.0f ? 0.0f : x * x;
    }
}

// Arithmetic of the format, without headers: an fp16 value is passed as its 16 bits.
// Python's constants arrive as definitions (see compiler.py).

typedef unsigned char byte;
typedef unsigned short half_bits;
typedef long long integer;  // the integer that Python passes

__device__ __forceinline__ half_bits to_half(float x) {
    half_bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float from_half(half_bits bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ integer grid_thread() {  // of the grid's first axis
    return (integer)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ float sum_of_warp(float value) {
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

__device__ __forceinline__ float clamped(float x, float low, float high) {
    return fminf(fmaxf(x, low), high);
}

// The decoder's scale: RN16(level² · RN16(maximum / 256)), level 1 to SCALE_LEVELS.
__device__ __forceinline__ float decoder_scale(float level, half_bits maximum) {
    const float unit = from_half(to_half(from_half(maximum) / (SCALE_LEVELS * SCALE_LEVELS)));
    return from_half(to_half(level * level * unit));
}

// The value of a signed code.
__device__ __forceinline__ float decoded(float step, float scale) {
    return from_half(to_half(step * scale));
}

// The signed code nearest to x; a scale of zero codes the zero point.
__device__ __forceinline__ float nearest_step(float x, float scale, float half_range) {
    if (scale <= 0.0f) return 0.0f;
    return clamped(rintf(__fdiv_rn(x, scale)), -half_range, half_range - 1.0f);
}

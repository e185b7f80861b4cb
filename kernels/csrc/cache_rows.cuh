// How elements of keys and values are stored.

enum { ELEMENTS };  // those of `Element` in cache_formats.py: HALF is 0, the rotated ones are last

template <int E> __device__ __forceinline__ constexpr int bits_of() {
    return E == HALF ? 16 : E == ROTATED_4 ? 4 : E == ROTATED_6 ? 6 : 8;
}
// Codes of 6 bits are read as those of 8 whose last two bits are zero.
template <int E> __device__ __forceinline__ constexpr int read_as() {
    return E == ROTATED_6 ? ROTATED_8 : E;
}
template <int E> __device__ __forceinline__ constexpr bool is_rotated() { return E >= ROTATED_8; }

struct Rows {  // keys or values of a layer by slot: bytes; fp16 scales, one per run of 32
    byte* data;
    half_bits* scales;
};

// Where codes of 6 bits are, of the first of two adjacent elements. 64 elements take 48 bytes: four
// upper bits of elements j and 16 + j (below), of 32 + j and 48 + j, two lower bits of all four.
struct Sixes {
    integer upper, lower;  // of u16: of two elements j
    int shift, quarter;    // of upper bits in their byte; which of the four
    __device__ __forceinline__ Sixes(integer at)
        : upper(at / 64 * 24 + at / 32 % 2 * 8 + at / 2 % 8), lower(at / 64 * 24 + 16 + at / 2 % 8),
          shift(at / 16 % 2 ? 0 : 4), quarter(at / 16 % 4) {}
};

// Multiply a warp's even places by H₃₂, and its odd ones; a lane has places 2 lane, 2 lane + 1.
__device__ __forceinline__ void rotate_unit(float* two, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int s = 1; s < 32; s <<= 1) {
            const float other = __shfl_xor_sync(~0u, two[i], s);
            two[i] = lane & s ? other - two[i] : two[i] + other;
        }
}

// Load what `put` wrote, like `decode` of reference/cache.py.
__device__ __forceinline__ void load(const Rows& rows, int element, integer at, half_bits* two,
                                     int lane) {
    if (element == HALF) {
        const u32 both = ((const u32*)rows.data)[at / 2];
        two[0] = both & 0xffff, two[1] = both >> 16;
        return;
    }
    if (element == UPPER_BYTE) {
        const u32 both = ((const unsigned short*)rows.data)[at / 2];
        two[0] = both << 8, two[1] = both & 0xff00;
        return;
    }
    u32 codes[2];
    if (element == ROTATED_8) {
        const u32 both = ((const unsigned short*)rows.data)[at / 2];
        codes[0] = both & 0xff, codes[1] = both >> 8;
    } else if (element == ROTATED_6) {
        const Sixes place(at);
        const u32 upper = ((const unsigned short*)rows.data)[place.upper] >> place.shift;
        const u32 lower = ((const unsigned short*)rows.data)[place.lower] >> 2 * place.quarter;
        for (int i = 0; i < 2; ++i)
            codes[i] = (upper >> 8 * i & 0xf) << 4 | (lower >> 8 * i & 3) << 2;
    } else {
        codes[0] = rows.data[at / 2] & 0xf, codes[1] = rows.data[at / 2] >> 4;
    }
    const float center = element == ROTATED_4 ? 8.0f : 128.0f;
    const float scale = from_half(rows.scales[at / 32]);
    float v[2] = {(codes[0] - center) * scale, (codes[1] - center) * scale};
    rotate_unit(v, lane);
    for (int i = 0; i < 2; ++i) two[i] = to_half(v[i] / 32.0f);
}

struct Code {  // two elements as they are stored; the scale of their run, if they have one
    u32 bits;
    half_bits scale;
};

// Encode elements 2 lane, 2 lane + 1 of 64 like `encode` of reference/cache.py, by a warp.
__device__ __forceinline__ Code encode(int element, const half_bits* two, int lane) {
    if (element == HALF) return {two[0] | (u32)two[1] << 16, 0};
    if (element == UPPER_BYTE) return {(u32)(two[0] >> 8) | (two[1] & 0xff00u), 0};
    float v[2] = {from_half(two[0]), from_half(two[1])};
    rotate_unit(v, lane);
    const float center = element == ROTATED_4 ? 8.0f : element == ROTATED_6 ? 32.0f : 128.0f;
    const float steps = element == ROTATED_4 ? 8.0f : 128.0f;  // of the scale
    float largest = fmaxf(fabsf(v[0]), fabsf(v[1]));
    for (int s = 1; s < 16; s <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, s));
    largest = fminf(largest, 65504.0f * steps);
    u32 codes[2];
    for (int i = 0; i < 2; ++i) {
        const float code = (largest > 0.0f ? __fdiv_rn(v[i], largest) : 0.0f) * center + center;
        codes[i] = (u32)clamped(rintf(code), 0.0f, 2.0f * center - 1.0f);
    }
    const half_bits scale = to_half(largest / steps);
    if (element != ROTATED_6) return {codes[0] | codes[1] << (element == ROTATED_8 ? 8 : 4), scale};
    const Sixes place(2 * lane);
    u32 upper = (codes[0] >> 2 | codes[1] >> 2 << 8) << place.shift;
    u32 lower = ((codes[0] & 3) | (codes[1] & 3) << 8) << 2 * place.quarter;
    upper |= __shfl_xor_sync(~0u, upper, 8);
    lower |= __shfl_xor_sync(~0u, lower, 8), lower |= __shfl_xor_sync(~0u, lower, 16);
    return {upper | lower << 16, scale};
}

// Put a lane's two elements in their place. at: of the first.
__device__ __forceinline__ void put(const Rows& rows, int element, integer at, const Code& code) {
    if (element == HALF) ((u32*)rows.data)[at / 2] = code.bits;
    else if (element == ROTATED_4) rows.data[at / 2] = code.bits;
    else if (element == ROTATED_6) {
        const Sixes place(at);
        if (place.quarter % 2 == 0) ((unsigned short*)rows.data)[place.upper] = code.bits;
        if (place.quarter == 0) ((unsigned short*)rows.data)[place.lower] = code.bits >> 16;
    }
    else ((unsigned short*)rows.data)[at / 2] = code.bits;
    if (element >= ROTATED_8 && at % 32 == 0) rows.scales[at / 32] = code.scale;
}

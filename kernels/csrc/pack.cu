// Codes to words and back: one thread per column of PANEL_ROWS rows, which fill as many words as a
// code has bits. table int64 (panels, 3): bits, first word, group.
#include "exl2.cuh"

// codes (k, n) -> packed int32 (words, n)
extern "C" __global__ void pack(const byte* codes, const integer* table, unsigned* packed, integer n) {
    const integer column = grid_thread(), panel = blockIdx.y;
    if (column >= n) return;
    const int bits = (int)table[panel * 3];
    unsigned* to = packed + table[panel * 3 + 1] * n + column;
    const byte* from = codes + panel * PANEL_ROWS * n + column;
    unsigned long long waiting = 0;
    int filled = 0;
    for (int i = 0; i < PANEL_ROWS; ++i) {
        waiting |= (unsigned long long)from[i * n] << filled;
        filled += bits;
        if (filled >= 32) {
            *to = (unsigned)waiting;
            to += n;
            waiting >>= 32;
            filled -= 32;
        }
    }
}

// packed int32 (words, n) -> codes (k, n)
extern "C" __global__ void unpack(const unsigned* packed, const integer* table, byte* codes,
                                  integer n) {
    const integer column = grid_thread(), panel = blockIdx.y;
    if (column >= n) return;
    const int bits = (int)table[panel * 3];
    const unsigned* from = packed + table[panel * 3 + 1] * n + column;
    byte* to = codes + panel * PANEL_ROWS * n + column;
    unsigned long long waiting = 0;
    int filled = 0;
    for (int i = 0; i < PANEL_ROWS; ++i) {
        if (filled < bits) {
            waiting |= (unsigned long long)*from << filled;
            from += n;
            filled += 32;
        }
        to[i * n] = (byte)(waiting & ((1u << bits) - 1));
        waiting >>= bits;
        filled -= bits;
    }
}

// codes (g, n), maxima fp16 (g,) -> scales fp16 (g, n)
extern "C" __global__ void decode_scales(const byte* codes, const half_bits* maxima,
                                         half_bits* scales, integer n) {
    const integer column = grid_thread();
    if (column >= n) return;
    const integer place = blockIdx.y * n + column;
    scales[place] = to_half(decoder_scale(codes[place] + 1.0f, maxima[blockIdx.y]));
}

// codes (k, n), scales fp16 (g, n) -> matrix fp16 (k, n): RN16((code - 2^(bits - 1)) · scale)
extern "C" __global__ void decode(const byte* codes, const half_bits* scales, const integer* table,
                                  half_bits* matrix, integer n) {
    const integer column = grid_thread(), panel = blockIdx.y;
    if (column >= n) return;
    const int zero = 1 << (int)(table[panel * 3] - 1);
    const float scale = from_half(scales[table[panel * 3 + 2] * n + column]);
    const integer begin = panel * PANEL_ROWS * n + column;
    for (int i = 0; i < PANEL_ROWS; ++i)
        matrix[begin + i * n] = to_half((int(codes[begin + i * n]) - zero) * scale);
}

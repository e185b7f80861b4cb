// Cached positions that a warp copies asynchronously from global to shared memory, as stored, and
// the tensor core operands made from them. From 16 bytes a lane needs one word: for keys, adjacent
// elements of one position; for values, elements of two positions, one in each half.
#include "ring.cuh"
#include "cache_rows.cuh"

__device__ __forceinline__ float power(float x) {  // 2^x; 0 below the normal numbers
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Copy B bytes, or write B zeros.
template <int B>
__device__ __forceinline__ void begin_copy(u32 to, const void* from, bool is_there) {
    if constexpr (B == 16)  // into L2 whole lines, of which other heads' CTAs need the rest
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}
// Bring a line into the L1 cache, for a load that needs more to know its address.
__device__ __forceinline__ void touch(const int* at) {
    asm volatile("{ .reg .b32 unused; ld.global.ca.b32 unused, [%0]; }" ::"l"(at));
}
__device__ __forceinline__ void end_step() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until all but the last (up to 3) steps have arrived.
__device__ __forceinline__ void wait_for_step(int others) {
    if (others >= 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
    else if (others == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (others == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
}
// Words of four matrices of 8 positions x 16 bytes; the lanes give the rows' addresses.
template <bool IS_TURNED> __device__ __forceinline__ void words_of(u32* r, u32 at) {
    if constexpr (IS_TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// The same of two matrices, of which the first 16 lanes give the rows' addresses.
template <bool IS_TURNED> __device__ __forceinline__ void two_words_of(u32* r, u32 at) {
    if constexpr (IS_TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ u32 turned_matrix(u32 a) {  // of 8 x 8 halves
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
__device__ __forceinline__ void mma_onto(float* d, const u32* a, const u32* b, const float* c) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%10,%11};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]));
}

// The offset of a code as an fp16 pair, of column j of a word: a field that begins at bit 0 or 4 of a
// mantissa counts units below the exponent of 1024 or 64. `zero_of` adds the zero point, exactly.
template <int B> __device__ __forceinline__ constexpr u32 base_of(int j) {
    return B == 8 || j % 2 == 0 ? 0x6400 : 0x5400;
}
template <int B> __device__ __forceinline__ constexpr u32 zero_of(int j) {
    return twice(base_of<B>(j) + ((1u << (B - 1)) << (B == 8 ? 0 : 4 * (j % 2))));
}

// Pair j of a word: one element of its lower and one of its upper half. Codes are above a base.
template <int E> __device__ __forceinline__ u32 pair(u32 word, int j) {
    if constexpr (E == HALF) return word;
    if constexpr (E == UPPER_BYTE) return j ? word & 0xff00ff00u : __byte_perm(word, 0, 0x2404);
    if constexpr (E == ROTATED_8) return __byte_perm(word, 0x64646464u, j ? 0x4341 : 0x4240);
    return pick(j < 2 ? word : word >> 8, twice(0xf << 4 * (j % 2)), twice(base_of<4>(j)));
}
// Base and center of a code, exact in fp16.
template <int E> __device__ __forceinline__ u32 center(int j) {
    return E == ROTATED_4 ? zero_of<4>(j) : zero_of<8>(j);
}

// Words of two chunks at a time, for a lane's row at `at`; i: of how many pairs there are in `read_as`.
template <int E, bool IS_TURNED> struct Words {
    u32 stored[E == ROTATED_6 ? 6 : 1];  // of 64 elements: two chunks and one
    __device__ __forceinline__ void read(u32* r, u32 at, int i) {
        if constexpr (E == ROTATED_6) {
            if (i % 2 == 0) {
                words_of<IS_TURNED>(stored, at + 24 * i);
                two_words_of<IS_TURNED>(stored + 4, at + 24 * i + 32);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // chunk j / 2, half j % 2 of the positions
                const u32 upper = stored[i % 2 * 2 + j % 2], lower = stored[4 + j % 2];
                const u32 moved = i % 2 ? lower >> 2 + 2 * (j / 2) : j / 2 ? lower : lower << 2;
                r[j] = ((j / 2 ? upper << 4 : upper) & 0xf0f0f0f0u) | (moved & 0x0c0c0c0cu);
            }
        } else {
            words_of<IS_TURNED>(r, at + 32 * i);
        }
    }
};

#define NOWHERE (1 << 30)

// Have the compiler keep a number in a register, because it takes longer to make it again.
__device__ __forceinline__ void keep(u32& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep(int& x) { asm volatile("" : "+r"(x)); }

// How a warp copies and reads WIDTH elements per position: in shared memory, the bytes after each
// row hold its scales, and also keep rows out of each other's banks. Chunks of a row are dealt out in
// powers of two: all of them, or of 6 bits those of upper and then those of lower bits. OF_WHOLE: of heads of 128
// elements, at least two, so that scales are copied 16 bytes at a time.
template <int WIDTH, int E, bool OF_WHOLE = false> struct Tiles {
    static constexpr int BYTES = WIDTH * bits_of<E>() / 8, DEALS = E == ROTATED_6 ? 2 : 1;
    static constexpr int ROW = BYTES + (WIDTH > 256 ? LONG_ROW_PAD : ROW_PAD);
    static constexpr int PAIRS = 16 / bits_of<read_as<E>()>();  // per word
    static constexpr int UNITS = WIDTH / 64;         // with two scales each
    static constexpr int COPIED = OF_WHOLE ? 4 : 1;  // units whose scales a lane copies
    static constexpr int COPIERS = UNITS / COPIED;   // lanes that copy the scales of a position
    const byte *data[DEALS], *scales;  // a lane's first bytes in slot 0
    u32 row, scale_row;                // bytes from a slot to the next
    u32 at[DEALS], behind;             // where a lane copies its first bytes and scales to
    bool is_used[DEALS];               // whether the head needs the bytes that the lane copies
    int scale_place;            // of a lane's first scales; beyond all if it has none

    // Chunks of a deal, and the byte of a row where one begins.
    __device__ __forceinline__ static constexpr int chunks(int deal) {
        return E == ROTATED_6 ? UNITS * (2 - deal) : BYTES / 16;
    }
    __device__ __forceinline__ static int byte_of(int deal, int chunk) {
        if (E != ROTATED_6) return chunk * 16;
        return deal ? chunk * 48 + 32 : chunk / 2 * 48 + chunk % 2 * 16;
    }

    // first: of WIDTH elements in a slot of `padded`; the head's own run from `low` to `high`.
    __device__ __forceinline__ Tiles(const Rows& rows, u32 padded, u32 first, int low, int high,
                                     int lane) {
        row = padded / 8 * bits_of<E>(), scale_row = padded / 16;
        scales = (const byte*)rows.scales + first / 16 + lane % COPIERS * COPIED * 4;
        scales += lane / COPIERS * scale_row;
        if (is_rotated<E>()) low = 0, high = (high + 63) / 64 * 64;
#pragma unroll
        for (int deal = 0; deal < DEALS; ++deal) {
            const int place = lane / chunks(deal), begin = byte_of(deal, lane % chunks(deal));
            const int element = E == ROTATED_6 ? begin / 48 * 64 : begin * 8 / bits_of<E>();
            data[deal] = rows.data + first / 8 * bits_of<E>() + place * row + begin;
            at[deal] = place * ROW + begin;
            is_used[deal] = element >= low && element < high;
        }
        scale_place = lane % COPIERS * COPIED * 64 < high ? lane / COPIERS : NOWHERE;
        behind = lane / COPIERS * ROW + BYTES + lane % COPIERS * COPIED * 4;
        if (is_rotated<E>()) {
            keep(behind), keep(scale_place);
            asm volatile("" : "+l"(scales));
#pragma unroll
            for (int deal = 0; deal < DEALS; ++deal) {
                keep(at[deal]);
                asm volatile("" : "+l"(data[deal]));
            }
        }
    }
    // Copy POSITIONS positions from a slot on. Of those beyond `left` numbers become zeros, and
    // codes remain what the page holds, because the scales become zeros.
    template <int POSITIONS> __device__ __forceinline__ void begin(u32 to, u32 slot, int left,
                                                              int lane) const {
#pragma unroll
        for (int deal = 0; deal < DEALS; ++deal) {
            const byte* from = data[deal] + (unsigned long long)slot * row;
            const int rows = 32 / chunks(deal), place = lane / chunks(deal);
#pragma unroll
            for (int i = 0; i < POSITIONS; i += rows)
                if (rows <= POSITIONS || place < POSITIONS)
                    begin_copy<16>(to + at[deal] + i * ROW, from + i * row,
                                   is_used[deal] && (is_rotated<E>() || place + i < left));
        }
        if constexpr (is_rotated<E>()) {
            const byte* scale = scales + (unsigned long long)slot * scale_row;
#pragma unroll
            for (int i = 0; i < POSITIONS; i += 32 / COPIERS)
                if (32 / COPIERS <= POSITIONS || lane / COPIERS < POSITIONS)
                    begin_copy<4 * COPIED>(to + behind + i * ROW, scale + i * scale_row,
                                           scale_place < left - i);
        }
    }
    // Put `count` rows of shared memory, from position `place` on, among those of a step.
    template <int POSITIONS> __device__ __forceinline__ void insert(byte* to, const byte* rows,
                                                               int place, int count,
                                                               int lane) const {
        const int scale = BYTES + lane % UNITS * 4;
#pragma unroll
        for (int deal = 0; deal < DEALS; ++deal) {
            const int begin = byte_of(deal, lane % chunks(deal));
            for (int i = lane / chunks(deal); i < count; i += 32 / chunks(deal))
                if (is_used[deal] && (unsigned)(place + i) < POSITIONS)
                    *(uint4*)(to + (place + i) * ROW + begin) =
                        *(const uint4*)(rows + i * ROW + begin);
        }
        if constexpr (is_rotated<E>())
            for (int i = lane / UNITS; i < count; i += 32 / UNITS)
                if ((OF_WHOLE || scale_place != NOWHERE) && (unsigned)(place + i) < POSITIONS)
                    *(u32*)(to + (place + i) * ROW + scale) = *(const u32*)(rows + i * ROW + scale);
    }
    // Address of a lane's matrix row, for 16 positions of two chunks.
    __device__ __forceinline__ static u32 place(int lane) {
        return lane % 16 * ROW + lane / 16 * 16;
    }
    // Pair i of the words of two chunks, for the given half of the positions.
    __device__ __forceinline__ static u32 element(const u32* words, int i, int half) {
        return pair<read_as<E>()>(words[2 * (i / PAIRS) + half], i % PAIRS);
    }
    // The position's element that is first in pair i of lane t; below, the second one.
    __device__ __forceinline__ static int first_of(int i, int t) {
        return (i / PAIRS * 4 + t) * 2 * PAIRS + i % PAIRS;
    }
    __device__ __forceinline__ static int second_of(int i, int t) { return first_of(i, t) + PAIRS; }
    // The element in row i of lane g of the sum of values.
    __device__ __forceinline__ static int summed(int i, int g) {
        return (i / PAIRS * 8 + g) * PAIRS + i % PAIRS;
    }
    // Scales of a row's runs, in adjacent pairs.
    __device__ __forceinline__ static void read_scales(u32* scales, const byte* of_row) {
        if constexpr (UNITS == 4) {
            const uint4 v = *(const uint4*)(of_row + BYTES);
            scales[0] = v.x, scales[1] = v.y, scales[2] = v.z, scales[3] = v.w;
        } else if constexpr (UNITS == 2) {
            const uint2 v = *(const uint2*)(of_row + BYTES);
            scales[0] = v.x, scales[1] = v.y;
        } else {
            scales[0] = *(const u32*)(of_row + BYTES);
        }
    }
};

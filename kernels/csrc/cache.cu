// Writing keys and values to a cache, and reading them.
#include "packed.cuh"
#include "cache_rows.cuh"

// Store keys or values x fp16 (t, width) at slots int64 (t,), like `encode` of reference/cache.py;
// each warp has 64 elements. element: see cache_rows.cuh.
extern "C" __global__ void write_rows(const half_bits* x, const integer* slots, byte* data,
                                      half_bits* scales, integer width, integer element) {
    const int lane = threadIdx.x % 32, unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const integer padded = (width + 63) / 64 * 64, at = unit * 64 + 2 * lane;
    if (unit * 64 >= padded) return;
    half_bits two[2];
    for (int i = 0; i < 2; ++i) two[i] = at + i < width ? x[blockIdx.x * width + at + i] : 0;
    put({data, scales}, element, slots[blockIdx.x] * padded + at, encode(element, two, lane));
}

// The inverse: read slots int64 (t,) into x fp16 (t, width).
extern "C" __global__ void read_rows(half_bits* x, const integer* slots, byte* data,
                                     half_bits* scales, integer width, integer element) {
    const int lane = threadIdx.x % 32, unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const integer padded = (width + 63) / 64 * 64, at = unit * 64 + 2 * lane;
    if (unit * 64 >= padded) return;
    half_bits two[2];
    load({data, scales}, element, slots[blockIdx.x] * padded + at, two, lane);
    half_bits* out = x + blockIdx.x * width + at;
    if (width % 2 == 0 && at < width) {
        *(u32*)out = two[0] | (u32)two[1] << 16;
    } else {
        for (int i = 0; i < 2; ++i)
            if (at + i < width) out[i] = two[i];
    }
}

// Copy a page, uint8, to row `index` of each table if it `is_stored`, else from there. tables, (n, 3):
// address of a table, bytes of its rows (a multiple of 16), and where a row begins in the page.
// blockIdx.x is a table.
extern "C" __global__ void move_page(byte* page, const integer* tables, integer index,
                                     integer is_stored) {
    const integer* table = tables + 3 * blockIdx.x;
    const integer nbytes = table[1];
    uint4* row = (uint4*)((byte*)table[0] + index * nbytes);
    uint4* here = (uint4*)(page + table[2]);
    const uint4* from = is_stored ? here : row;
    uint4* to = is_stored ? row : here;
    for (integer i = (integer)blockIdx.y * blockDim.x + threadIdx.x; i < nbytes / 16;
         i += (integer)gridDim.y * blockDim.x)
        to[i] = from[i];
}

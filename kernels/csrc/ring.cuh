// A warp's copies in flight from global to shared memory: each slot has an mbarrier, which signals
// that its bytes have arrived. From sm_90 on, one lane requests all bytes; before, each lane 16.
// L2 drops them first: hidden states, tables and code stay there.

typedef unsigned long long Barrier;
#define EVICT_FIRST 0x12F0000000000000ull  // createpolicy.fractional.L2::evict_first, of all bytes

__device__ __forceinline__ u32 shared_address(const void* at) {
    return (u32)__cvta_generic_to_shared(at);
}

__device__ __forceinline__ void begin_barrier(u32 barrier) {
#if __CUDA_ARCH__ >= 900
    constexpr int COUNT = 1;
#else
    constexpr int COUNT = 32;
#endif
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
// Call after all barriers of a warp are initialized, before the first copy.
__device__ __forceinline__ void end_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncwarp();
}

__device__ __forceinline__ void prefetch(const void* at) {  // to L2, a line of 128 bytes
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Begin to copy a multiple of 16 bytes, each lane 16 at a time.
__device__ __forceinline__ void copy_by_lanes(u32 to, const byte* from, int bytes) {
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to + i),
                     "l"(from + i), "l"(EVICT_FIRST));
}

// Copy a multiple of 16 bytes, by a warp.
__device__ __forceinline__ void copy_bytes(u32 barrier, u32 to, const byte* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred p; elect.sync _|p, 0xffffffff;"
        "@p mbarrier.arrive.expect_tx.shared.b64 _, [%0], %3;"
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%1], [%2], %3, [%0], %4;"
        "}" ::"r"(barrier), "r"(to), "l"(from), "r"(bytes), "l"(EVICT_FIRST) : "memory");
#else
    copy_by_lanes(to, from, bytes);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Copy two runs of bytes at once.
__device__ __forceinline__ void copy_both(u32 barrier, u32 to, const byte* from, int bytes,
                                          u32 other, const byte* other_from, int other_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred p; elect.sync _|p, 0xffffffff;"
        "@p mbarrier.arrive.expect_tx.shared.b64 _, [%0], %7;"
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%1], [%2], %3, [%0], %8;"
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%4], [%5], %6, [%0], %8;"
        "}" ::"r"(barrier), "r"(to), "l"(from), "r"(bytes), "r"(other), "l"(other_from),
        "r"(other_bytes), "r"(bytes + other_bytes), "l"(EVICT_FIRST) : "memory");
#else
    copy_by_lanes(other, other_from, other_bytes);
    copy_bytes(barrier, to, from, bytes);
#endif
}

__device__ __forceinline__ void wait_for_bytes(u32 barrier, int parity) {
    int there = 0;
    while (!there)
#if __CUDA_ARCH__ >= 900
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
                     "selp.b32 %0, 1, 0, p;}" : "=r"(there) : "r"(barrier), "r"(parity) : "memory");
#else
        asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; "
                     "selp.b32 %0, 1, 0, p;}" : "=r"(there) : "r"(barrier), "r"(parity) : "memory");
#endif
}

// A step: panels of a block with the scales of the block, an int each: bits | panels << 4 | is the
// last of a segment << 7 | per panel, the place of its group among the block's << 8 | panels behind
// them in the block << 16 | (groups of the block - 1) << 18 | bytes of codes
// and scales if both are copied at once, in units of 16, << 20.
struct Step {
    int bits, bytes, rest, scales;  // bytes: of the codes; rest: of those behind them

    __device__ __forceinline__ Step(int kind, int scale_bytes) {
        const int panel = (kind & 15) * 128;
        bits = kind & 15, bytes = (kind >> 4 & 7) * panel, rest = (kind >> 16 & 3) * panel;
        scales = ((kind >> 18 & 3) + 1) * scale_bytes;
    }
};

// Fetch a step to a slot, where scales follow the codes; return where the next one begins.
template <int SCALE_BYTES>
__device__ __forceinline__ const byte* fetch(int kind, u32 barrier, u32 slot, const byte* from) {
    if (const int bytes = (kind >> 20) * 16) {
        copy_bytes(barrier, slot, from, bytes);
        return from + bytes;
    }
    const Step step(kind, SCALE_BYTES);
    const byte* next = from + step.bytes;
    copy_both(barrier, slot, from, step.bytes, slot + step.bytes, next + step.rest, step.scales);
    return next;
}

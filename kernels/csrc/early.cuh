// A launch that starts while the previous one still runs (programmatic dependent launch): before it
// waits, it may read only constant data such as weights. Every kernel launched this way waits, even
// if it reads nothing from the previous one, because the next one relies on all before it.

__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_the_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void overlap_launches() { let_the_next_begin(), wait_for_input(); }

// CTA `rank` of `ctas` that are resident together meets the others: everything written before is
// visible to each after. The counter need not be cleared: its highest bit flips when the last one
// arrives. `arrive` returns what `await` waits for.
__device__ __forceinline__ unsigned arrive(unsigned* meetings, unsigned rank, unsigned ctas) {
    __syncthreads();
    unsigned before = 0;
    if (threadIdx.x == 0)
        asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(meetings), "r"(rank ? 1 : 0x80000001u - ctas) : "memory");
    return before;
}
__device__ __forceinline__ void await(const unsigned* meetings, unsigned before) {
    if (threadIdx.x == 0) {
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(now) : "l"(meetings) : "memory");
        } while (!((before ^ now) >> 31));
    }
    __syncthreads();
}
__device__ __forceinline__ void meet(unsigned* meetings, unsigned rank, unsigned ctas) {
    await(meetings, arrive(meetings, rank, ctas));
}

// A launch that begins while the last one still runs (programmatic dependent launch): until it has
// waited it may read only what never changes, such as weights. Every kernel that is launched so
// waits, even if it reads nothing of the last one, for the next one relies on all before it.

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

// All CTAs of a launch meet: what they wrote before is there for each after. The counter need not
// be cleared: its highest bit turns when the last one comes.
__device__ __forceinline__ void meet(unsigned* meetings) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const unsigned before = atomicAdd(meetings, blockIdx.x ? 1 : 0x80000001u - gridDim.x);
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(now) : "l"(meetings) : "memory");
        } while (!((before ^ now) >> 31));
    }
    __syncthreads();
}

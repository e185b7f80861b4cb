// Two CTAs of a cluster that stage the same x: each turns half of it into numbers, for both.
#if __CUDA_ARCH__ >= 900
template <int ROWS> constexpr bool HAS_TWIN = ROWS > 1;
#define TWINS(ROWS) __cluster_dims__(ROWS > 1 ? 2 : 1, 1, 1)
#else
template <int ROWS> constexpr bool HAS_TWIN = false;
#define TWINS(ROWS)
#endif

// What a CTA has begun to write to the other one is visible there after both have called.
__device__ __forceinline__ void meet_twin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// The other CTA's address of what lies in this one's shared memory.
__device__ __forceinline__ u32 at_twin(const void* at) {
    u32 there = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there)
        : "r"((u32)__cvta_generic_to_shared(at)), "r"(1 - blockIdx.x % 2));
#endif
    return there;
}
__device__ __forceinline__ void put_at_twin(u32 to, u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
#endif
}
__device__ __forceinline__ void put_at_twin(u32 to, float x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
#endif
}

// Two CTAs of a cluster with adjacent parts of the same tiles: a warp of one and a warp of the other
// add up their sums of a tile, each those of half of the rows, in their own shared memory.
#if __CUDA_ARCH__ >= 900
template <int ROWS> constexpr int CLUSTER = ROWS >= PAIRED_ROWS ? 2 : 1;
#else
template <int ROWS> constexpr int CLUSTER = 1;
#endif
#if __CUDA_ARCH__ >= 900
#define CLUSTERS(CTAS) __cluster_dims__(CTAS, 1, 1)
#else
#define CLUSTERS(CTAS)
#endif
template <int ROWS> constexpr int PAIR_BYTES = ROWS * 64;  // of a warp: half of a tile's sums

__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// A warp's half of a pair. buffer: where the other one's sums arrive, by `full`; `taken`: whether the
// other one has read what was sent last.
template <int ROWS> struct Pair {
    static constexpr int HALF = ROWS < 16 ? 1 : ROWS / 16;  // eights of rows

    u32 buffer, full, taken;
    u32 others_buffer, others_full, others_taken;
    int rank, turn;

    __device__ __forceinline__ Pair(u32 buffer, u32 barriers) : buffer(buffer), full(barriers),
                                                                taken(barriers + 8), turn(0) {
        rank = blockIdx.x % 2;
        others_buffer = remote(buffer), others_full = remote(full), others_taken = remote(taken);
    }
    __device__ __forceinline__ u32 remote(u32 at) const {
        u32 there = 0;
#if __CUDA_ARCH__ >= 900
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(1 - rank));
#endif
        return there;
    }
    __device__ __forceinline__ void wait(u32 barrier, int parity) const {
#if __CUDA_ARCH__ >= 900
        int there = 0;
        while (!there)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, "
                         "[%1], %2; selp.b32 %0, 1, 0, p;}"
                         : "=r"(there) : "r"(barrier), "r"(parity) : "memory");
#endif
    }
    // Add the other warp's sums of this one's rows, and send it those of its rows. Rows 8 n on belong
    // to the first of the pair if n < HALF.
    __device__ __forceinline__ void add(float (*total)[2][4]) {
#if __CUDA_ARCH__ >= 900
        const int lane = threadIdx.x % 32;
        if (turn) wait(taken, (turn - 1) & 1);
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full),
                         "r"(PAIR_BYTES<ROWS>) : "memory");
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n) {
            if ((n < HALF) == (rank == 0)) continue;
#pragma unroll
            for (int m = 0; m < 2; ++m)
                asm volatile(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, "
                    "%4}, [%5];" ::"r"(others_buffer + (n % HALF * 2 + m) * 512 + lane * 16),
                    "f"(total[n][m][0]), "f"(total[n][m][1]), "f"(total[n][m][2]),
                    "f"(total[n][m][3]), "r"(others_full) : "memory");
        }
        wait(full, turn & 1);
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n) {
            if ((n < HALF) != (rank == 0)) continue;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float v[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                             : "r"(buffer + (n % HALF * 2 + m) * 512 + lane * 16) : "memory");
#pragma unroll
                for (int i = 0; i < 4; ++i) total[n][m][i] += v[i];
            }
        }
        __syncwarp();
        if (lane == 0)
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                             others_taken) : "memory");
        ++turn;
#endif
    }
    __device__ __forceinline__ bool has(int n) const { return (n < HALF) == (rank == 0); }
};

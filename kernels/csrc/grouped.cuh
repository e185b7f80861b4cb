// Panels times 16 to 64 rows of x by four warps together, on tensor cores that read x in shared memory: with
// instructions that only sm_90a has. Each warp has tiles of its own; all four have the same panels.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int ROWS> constexpr bool IS_GROUPED = ROWS >= GROUPED_ROWS;
#else
template <int ROWS> constexpr bool IS_GROUPED = false;
#endif
constexpr int GROUP = 4;  // warps

// Put 8 numbers of x, `paired`, where `multiply_grouped` reads them: a panel has four operands of 8
// numbers of each row of x. The first one has numbers 8 t and 8 t + 2, the next 8 t + 1 and 8 t + 3.
template <int ROWS> __device__ __forceinline__ void put_grouped(byte* xs, int at, const uint4& v) {
    u32* to = (u32*)xs + at / (4 * ROWS) * (16 * ROWS) + at % (4 * ROWS);
    to[0] = v.x, to[4 * ROWS] = v.y, to[8 * ROWS] = v.z, to[12 * ROWS] = v.w;
}

// Call between writing x and the barrier of the CTA.
__device__ __forceinline__ void end_grouped() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// D += A B: 16 columns of each warp x 16 rows, 16 rows x ROWS of x.
#define SUMS(n) "+f"(d[n][m][0]), "+f"(d[n][m][1]), "+f"(d[n][m][2]), "+f"(d[n][m][3])
#define GROUPED(SHAPE, OWN, A, X, ...)                                          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"                         \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32.f16.f16 "         \
                 "{" OWN "}, {" A "}, " X ", p, 1, 1, 0;}"                      \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x))
template <int ROWS>
__device__ __forceinline__ void mma_grouped(float (*d)[2][4], int m, const u32* a,
                                            unsigned long long x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (ROWS == 16)
        GROUPED("m64n16k16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", SUMS(0), SUMS(1));
    if constexpr (ROWS == 32)
        GROUPED("m64n32k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15",
                "%16,%17,%18,%19", "%20", SUMS(0), SUMS(1), SUMS(2), SUMS(3));
    if constexpr (ROWS == 64)
        GROUPED("m64n64k16",
                "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
                "%23,%24,%25,%26,%27,%28,%29,%30,%31",
                "%32,%33,%34,%35", "%36", SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5),
                SUMS(6), SUMS(7));
#endif
}

// The same as `multiply`, of x at a shared address. is_there: whether the warp has codes; if not, it
// only takes part.
template <int B, int ROWS, bool GPTQ>
__device__ __forceinline__ void multiply_grouped(const byte* codes, const byte* scales, u32 x,
                                                 int kind, int lane, bool is_there,
                                                 float (*total)[2][4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int SCALE_BYTES = GPTQ ? 128 : 32;
    // bytes from one operand to the next, and from 8 of its rows to the next, in units of 16
    constexpr unsigned long long STEPS = (unsigned long long)ROWS << 16 | 8ull << 32;
    const int panels = kind >> 4 & 7;
#pragma unroll 1
    for (int p = 0; p < panels; ++p, x += ROWS * 64, codes += B * 128) {
        u32 w[B], a[2][2][4] = {};
        if (is_there) {
            read_words<B>(codes, lane, w);
            const byte* at = scales + (kind >> (8 + 2 * p) & 3) * SCALE_BYTES;
            values<B, GPTQ>(w, half_scales_of<GPTQ>(at, lane / 4), a);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i)
            mma_grouped<ROWS>(total, i % 2, a[i % 2][i / 2], STEPS | (x + i / 2 * ROWS * 32) >> 4);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
#endif
}

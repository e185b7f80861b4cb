// Panels times 64 rows of x by four warps together, on tensor cores that read x in shared memory: with
// instructions that only sm_90a has. Each warp has tiles of its own; all four have the same panels.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int GROUPED_ROWS = 64;
#else
constexpr int GROUPED_ROWS = 0;
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

// D += A B: 16 columns of each warp x 16 rows, 16 rows x 64 of x.
__device__ __forceinline__ void mma_grouped(float (*d)[2][4], int m, const u32* a,
                                            unsigned long long x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : "+f"(d[0][m][0]), "+f"(d[0][m][1]), "+f"(d[0][m][2]), "+f"(d[0][m][3]),
          "+f"(d[1][m][0]), "+f"(d[1][m][1]), "+f"(d[1][m][2]), "+f"(d[1][m][3]),
          "+f"(d[2][m][0]), "+f"(d[2][m][1]), "+f"(d[2][m][2]), "+f"(d[2][m][3]),
          "+f"(d[3][m][0]), "+f"(d[3][m][1]), "+f"(d[3][m][2]), "+f"(d[3][m][3]),
          "+f"(d[4][m][0]), "+f"(d[4][m][1]), "+f"(d[4][m][2]), "+f"(d[4][m][3]),
          "+f"(d[5][m][0]), "+f"(d[5][m][1]), "+f"(d[5][m][2]), "+f"(d[5][m][3]),
          "+f"(d[6][m][0]), "+f"(d[6][m][1]), "+f"(d[6][m][2]), "+f"(d[6][m][3]),
          "+f"(d[7][m][0]), "+f"(d[7][m][1]), "+f"(d[7][m][2]), "+f"(d[7][m][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
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
            mma_grouped(total, i % 2, a[i % 2][i / 2], STEPS | (x + i / 2 * ROWS * 32) >> 4);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
#endif
}

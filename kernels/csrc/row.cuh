// The ordered candidates of a row, and reductions over its CTAs: one with all candidates in shared
// memory, or TEAM of them, each with a slice of the row in global memory.
#include "sampler.cuh"

// Running sums: within slices, and before each slice.
struct Sums {
    double *at, *before;
    int slice;
    __device__ double upto(int n) const { return n ? at[n - 1] + before[(n - 1) / slice] : 0.0; }
};

struct Row {
    int n, begin, end, slice;  // candidates; those of this CTA; of each CTA
    int rank, ctas;            // this CTA among those of the row
    unsigned* meetings;        // see meet
    double* partial;           // (2, TEAM, 3): what the CTAs tell each other
    int told;                  // how often they did
    const double* of;          // the row's settings
    const float* logits;       // in order
    const integer* order;      // their ids; null: they are in `ids`
    int *ids, *listed, *sorted;  // the latter two: see put_in_order
    double *weights, *sums;      // in order, and their running sums
    double *shaped, *spare;      // weights that no longer fall; other running sums
    double* before;              // (2, TEAM): of `sums` and of `spare`, in shared memory
    __device__ int id(int i) const { return order ? (int)order[i] : ids[i]; }
    __device__ int last(int kept) const { return min(end, kept); }
};

// Combine what the CTAs of a row found, in their order: two sums, then a maximum. Everything they
// wrote before can be read afterwards. Returns what each of them found, 3 numbers apart.
template <int N> __device__ const double* tell(Row& r, double (&found)[N]) {
    if (r.ctas == 1) return __syncthreads(), nullptr;
    double* const room = r.partial + (r.told++ & 1) * TEAM * 3;
    if (threadIdx.x == 0)
        for (int i = 0; i < N; ++i) room[r.rank * 3 + i] = found[i];
    meet(r.meetings, r.rank, r.ctas);
    for (int i = 0; i < N; ++i) {
        double total = room[i];
        for (int cta = 1; cta < r.ctas; ++cta) {
            const double next = room[cta * 3 + i];
            total = i == 2 ? fmax(total, next) : total + next;
        }
        found[i] = total;
    }
    return room;
}

// Put the running sums of value(i) for i below n into r.sums or r.spare.
template <class Value> __device__ Sums running(Row& r, double* at, int n, Value value) {
    constexpr int EACH = 4;
    __shared__ double warps[2][32];
    double* const before = r.before + (at == r.spare) * TEAM;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double carry = 0;
    int turn = 0;
    __syncthreads();  // value(i) may read what another thread wrote
    for (int base = r.begin; base < r.last(n); base += EACH * blockDim.x) {
        const int first = base + EACH * threadIdx.x;
        double sums[EACH];
        for (int j = 0; j < EACH; ++j) {
            sums[j] = first + j < r.last(n) ? value(first + j) : 0.0;
            if (j) sums[j] += sums[j - 1];
        }
        double upto = sums[EACH - 1];
        for (int o = 1; o < 32; o *= 2) {
            const double other = __shfl_up_sync(~0u, upto, o);
            if (lane >= o) upto += other;
        }
        double* const of = warps[turn ^= 1];
        if (lane == 31) of[warp] = upto;
        double ahead = __shfl_up_sync(~0u, upto, 1);
        if (lane == 0) ahead = 0;
        __syncthreads();
        double all = carry;
        for (int w = 0; w < (int)blockDim.x / 32; ++w) {
            if (w == warp) ahead += all;
            all += of[w];
        }
        for (int j = 0; j < EACH; ++j)
            if (first + j < r.last(n)) at[first + j] = ahead + sums[j];
        carry = all;
    }
    double found[1] = {carry};
    const double* const each = tell(r, found);
    if (threadIdx.x == 0) {
        before[0] = 0;
        for (int cta = 1; cta < r.ctas; ++cta) before[cta] = before[cta - 1] + each[3 * cta - 3];
    }
    __syncthreads();
    return {at, before, r.slice};
}

// Sampling a token from the candidates.
#include "chain.cuh"

// A row's token, and those of its pair: append it to the histories.
__device__ void finish(const Sampler& s, integer row, int id) {
    const int slots = s.mixes && s.partner[row] != row ? 2 : 1;
    for (int pair = 0; pair < slots; ++pair) {
        const integer slot = pair ? s.partner[row] : row;
        const int count = s.counts[slot], active = s.active[slot];
        s.ids[slot] = id;
        const integer place = active > 0 ? count : s.room;  // idle slots write beyond the history
        s.history[slot * (s.room + 1) + place] = id < 0 ? (int)s.vocab : id;
        s.counts[slot] = (int)min((integer)(count + active), s.room);
    }
}

__device__ bool is_fine(const Sampler& s, integer row) {
    int flags = 0;
    for (int i = threadIdx.x % 32; i < s.flagged; i += 32) flags |= s.flags[row * s.flagged + i];
    return __reduce_or_sync(~0u, flags) == 2;
}

__device__ void choose(const Sampler& s, Row& r, integer row) {
    const integer last = s.top * row;
    const bool writes = r.rank == 0 && threadIdx.x == 0;
    const bool leads = !s.mixes || s.lead[row] == row;
    bool fine = is_fine(s, row) && fabsf(r.logits[0]) < INFINITE;
    if (s.mixes) fine = fine && is_fine(s, s.partner[row]);
    if (!fine) {
        for (int i = threadIdx.x; r.rank == 0 && i < s.top; i += blockDim.x)
            s.top_ids[last + i] = r.id(i), s.top_probabilities[last + i] = 0;
        if (writes && leads) finish(s, row, -1);
        if (writes) s.probabilities[row] = 0;
        return;
    }
    Sums sums;
    int kept = keep_prefix(r, sums), found = kept;
    const double* weights = r.weights;
    const int* ids = nullptr;
    const double mu = s.mu[row];
    const bool reheats = r.of[MIN_TEMP] != 1 || r.of[MAX_TEMP] != 1, is_typical = r.of[TYPICAL] < 1;
    const bool spares = s.ignored && r.of[XTC_PROBABILITY] > 0;
    if (is_typical || mu < INFINITE || reheats || spares) {
        weights = r.shaped;
        keep_typical(r, sums, kept);
        if (mu < INFINITE) limit_surprise(r, mu, kept);
        if (reheats) reheat(r, kept);
        if (spares) spare_unlikely(r, s.ignored + row * s.words, kept);
        if (is_typical || spares)
            found = put_in_order(r, kept), weights = r.sums, ids = r.sorted;
        sums = running(r, r.spare, found, [&](int i) { return weights[i]; });
        if (!ids) found = leading(found, [&](int i) { return weights[i] > 0; });
    }
    const double total = sums.upto(found), bend = 1 / r.of[SKEW];
    const int place = first_of(r, found, s.draws[row], [&](int i) {
        if (bend == 1) return weights[i];
        const double moved = pow(sums.upto(i + 1) / total, bend) - pow(sums.upto(i) / total, bend);
        return weights[i] > 0 ? fmax(moved, LEAST) : 0.0;
    }, [&](int i) { return ids ? ids[i] : r.id(i); });
    for (int i = threadIdx.x; r.rank == 0 && i < s.top; i += blockDim.x) {
        s.top_ids[last + i] = ids && i < kept ? ids[i] : r.id(i);
        s.top_probabilities[last + i] = i < found ? weights[i] / total : 0.0;
    }
    if (!writes) return;
    const double probability = weights[place] / total;
    s.probabilities[row] = probability;
    s.mu[row] += s.active[row] * r.of[MIROSTAT_ETA] * (r.of[MIROSTAT_TAU] + log2(probability));
    if (leads) finish(s, row, ids ? ids[place] : r.id(place));
}

// Rows of few candidates: the likeliest of the pieces' keys, in order. blockIdx is the row.
extern "C" __global__ void __launch_bounds__(1024) choose_few(const Sampler s) {
    extern __shared__ Key sorted[];  // as many as a power of two; then the arrays of a row
    __shared__ double before[2 * TEAM];
    __shared__ int taken;
    overlap_launches();
    const integer row = blockIdx.x;
    const int most = (int)s.most, given = (int)s.pieces * most;
    const Key* const keys = s.keys + row * given;
    int room = 1;
    while (room < most) room *= 2;
    const auto key = [&](int j) -> Key {
        const int i = j * blockDim.x + threadIdx.x;
        return i < given ? keys[i] : 0;
    };
    const int each = (given + blockDim.x - 1) / blockDim.x;
    Key greatest = 0;
    for (int j = 0; j < each; ++j) greatest = max(greatest, key(j));
    greatest = greatest_of_cta(greatest);
    int turn = 0;
    const Key least = bound_of(64, greatest, most, turn, [&](Key bound) {
        int count = 0;
        for (int j = 0; j < each; ++j) count += key(j) >= bound;
        return count;
    }).at;
    if (threadIdx.x == 0) taken = 0;
    for (int i = threadIdx.x; i < room; i += blockDim.x) sorted[i] = 0;
    __syncthreads();
    for (int j = 0; j < each; ++j)
        if (key(j) && key(j) >= least) sorted[atomicAdd(&taken, 1)] = key(j);
    // a bitonic sort, falling
    for (int size = 2; size <= room; size *= 2)
        for (int apart = size / 2; apart; apart /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < room / 2; i += blockDim.x) {
                const int a = 2 * i - (i & (apart - 1)), b = a + apart;
                const Key first = sorted[a], second = sorted[b];
                if ((first < second) == !(a & size)) sorted[a] = second, sorted[b] = first;
            }
        }
    __syncthreads();
    double* const arrays = (double*)(sorted + room);
    float* const logits = (float*)(arrays + 4 * room);
    int* const ids = (int*)(logits + room);
    for (int i = threadIdx.x; i < most; i += blockDim.x) {
        const int bits = (int)((unsigned)(sorted[i] >> 32) ^ 0x80000000u);
        logits[i] = __int_as_float(bits < 0 ? (int)(0x80000000u - (unsigned)bits) : bits);
        ids[i] = (int)~(unsigned)sorted[i];
    }
    __syncthreads();
    Row r = {most, 0, most, most, 0, 1, nullptr, nullptr, 0, s.table + row * COLUMNS, logits};
    r.ids = ids, r.listed = ids + room, r.sorted = ids + 2 * room;
    r.weights = arrays, r.shaped = arrays + room;
    r.sums = arrays + 2 * room, r.spare = arrays + 3 * room, r.before = before;
    choose(s, r, row);
}

// Rows of many candidates, in order. blockIdx is (CTA of a team, team); a team takes row by row.
extern "C" __global__ void __launch_bounds__(1024) choose_all(const Sampler s) {
    __shared__ double before[2 * TEAM];
    overlap_launches();
    const int n = (int)s.most, slice = (n + TEAM - 1) / TEAM;
    const int begin = min(n, (int)blockIdx.x * slice), end = min(n, begin + slice);
    double* const arrays = s.scratch + blockIdx.y * 5 * s.most;
    int* const ids = (int*)(arrays + 4 * s.most);
    unsigned* const meetings = s.meetings + blockIdx.y;
    double* const partial = s.partial + blockIdx.y * 6 * TEAM;
    Row r = {n, begin, end, slice, (int)blockIdx.x, TEAM, meetings, partial};
    r.listed = ids, r.sorted = ids + n;
    r.weights = arrays, r.shaped = arrays + n;
    r.sums = arrays + 2 * s.most, r.spare = arrays + 3 * s.most, r.before = before;
    for (integer row = blockIdx.y; row < s.rows; row += gridDim.y) {
        r.of = s.table + row * COLUMNS;
        r.logits = s.ordered + row * s.most;
        r.order = s.order + row * s.most;
        choose(s, r, row);
        meet(meetings, blockIdx.x, TEAM);
    }
}

// From ranked candidates to a token: the steps that drop or reweigh candidates, and the draw. A row
// has one CTA with its candidates in shared memory, or TEAM of them, each with a slice of the row.
#include "sampler.cuh"

// Running sums of n numbers: within slices, and before each slice.
struct Sums {
    double *at, *before;
    int slice;
    __device__ double upto(int n) const { return n ? at[n - 1] + before[(n - 1) / slice] : 0.0; }
};

struct Row {
    int n, begin, end, slice;  // candidates; those of this CTA; of each CTA
    int rank, ctas;            // this CTA among those of the row
    unsigned* meetings;
    double* partial;  // (2, TEAM, 3): what the CTAs of the row tell each other
    int told;
    const double* of;      // the row's settings
    const float* logits;   // in order
    const integer* order;  // their ids; null: they are in `ids`
    int *ids, *listed, *sorted;
    double *weights, *shaped, *sums, *spare;
    double* before;  // (2, TEAM): of `sums` and `spare`
    __device__ int id(int i) const { return order ? (int)order[i] : ids[i]; }
    __device__ int last(int kept) const { return min(end, kept); }
};

// What the CTAs of a row found, as one of them after the other: sums, then one maximum.
template <int N> __device__ void tell(Row& r, double (&found)[N], double* each = nullptr) {
    if (r.ctas == 1) return __syncthreads();
    double* const room = r.partial + (r.told++ & 1) * TEAM * 3;
    if (threadIdx.x == 0)
        for (int i = 0; i < N; ++i) room[r.rank * 3 + i] = found[i];
    meet(r.meetings, r.rank, r.ctas);
    if (each && threadIdx.x == 0)
        for (int cta = 0; cta < r.ctas; ++cta) each[cta] = room[cta * 3];
    for (int i = 0; i < N; ++i) {
        double total = room[i];
        for (int cta = 1; cta < r.ctas; ++cta) {
            const double next = room[cta * 3 + i];
            total = i == 2 ? fmax(total, next) : total + next;
        }
        found[i] = total;
    }
}

// Put the running sums of value(i) for i below n; r.at[..] of all CTAs can be read afterwards.
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
    double found[1] = {carry}, *const each = r.before + 2 * TEAM;
    tell(r, found, each);
    if (threadIdx.x == 0) {
        double total = 0;
        for (int cta = 0; cta < r.ctas; ++cta) before[cta] = total, total += each[cta];
    }
    __syncthreads();
    return {at, before, r.slice};
}

// Keep a prefix: temperature, smoothing, top-k, top-p, top-a, min-p, tail-free sampling.
__device__ int keep_prefix(Row& r, Sums& sums) {
    const double best = r.logits[0], factor = r.of[SMOOTHING_FACTOR], heat = r.of[TEMPERATURE];
    const double top_p = r.of[TOP_P], top_a = r.of[TOP_A], tfs = r.of[TFS];
    double* const w = r.weights;
    sums = running(r, r.sums, r.n, [&](int i) {
        double x = r.logits[i] - best;
        if (factor > 0) x = -factor * x * x;
        x = exp(x / heat);
        return w[i] = x > 0 ? x : 0.0;
    });
    int kept = leading(r.n, [&](int i) { return w[i] > 0; });
    kept = (int)fmin((double)kept, r.of[TOP_K]);
    const double mass = top_p * sums.upto(kept);
    kept = min(kept, leading(kept, [&](int i) { return sums.upto(i + 1) < mass; }) + 1);
    const double least = fmax(r.of[MIN_P], top_a / sums.upto(kept));
    kept = max(1, leading(kept, [&](int i) { return w[i] >= least; }));
    if (tfs < 1 && kept > 2) {
        const Sums curve = running(r, r.spare, kept - 2, [&](int i) {
            return fabs(w[i] - 2 * w[i + 1] + w[i + 2]);
        });
        const double bound = tfs * curve.upto(kept - 2);
        kept = leading(kept - 2, [&](int i) { return curve.upto(i + 1) <= bound; }) + 1;
    }
    return kept;
}

// The sum of the weights, how many are above 0, and the first of them.
struct Mass { double sum; int count, first; };
__device__ Mass mass_of(Row& r, int kept) {
    double found[3] = {0, 0, -(double)r.n};
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) {
        if (!(r.shaped[i] > 0)) continue;
        found[0] += r.shaped[i], found[1] += 1, found[2] = fmax(found[2], (double)-i);
    }
    found[0] = over_cta<false>(found[0]);
    found[1] = over_cta<false>(found[1]);
    found[2] = over_cta<true>(found[2]);
    tell(r, found);
    return {found[0], (int)found[1], (int)-found[2]};
}

__device__ double entropy_of(Row& r, const double* weights, double sum, int kept) {
    double found[1] = {0};
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) {
        const double share = weights[i] / sum;
        if (share > 0) found[0] -= share * log(share);
    }
    found[0] = over_cta<false>(found[0]);
    tell(r, found);
    return found[0];
}

// Typical sampling: a token stays if those nearer to the entropy have less mass than the bound.
// Weights fall, so that distances fall on the left of the entropy and rise on its right; two are
// compared by their product. Of equal distances the likelier token's is first.
__device__ void keep_typical(Row& r, const Sums& sums, int kept) {
    const double* const w = r.weights;
    const double mass = sums.upto(kept), bound = r.of[TYPICAL] * mass;
    const double middle = mass * exp(NEAR - entropy_of(r, w, mass, kept)), square = middle * middle;
    const int left = leading(kept, [&](int i) { return w[i] >= middle; });
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) {
        double nearer;
        if (i >= left) {
            nearer = sums.upto(i) - sums.upto(first_without(0, left, [&](int j) { return w[j] * w[i] > square; }));
        } else {
            const int equal = first_without(0, left, [&](int j) { return w[j] > w[i]; });
            const int after = first_without(i, left, [&](int j) { return w[j] >= w[i]; });
            const int right = first_without(left, kept, [&](int j) { return w[j] * w[i] > square; });
            nearer = sums.upto(right) - sums.upto(after) + (sums.upto(i) - sums.upto(equal));
        }
        r.shaped[i] = nearer < bound ? w[i] : 0.0;
    }
}

// Mirostat's bound, and p^(1/T) with T = low + (high - low) (H / ln n)^exponent.
__device__ void limit_and_reheat(Row& r, double mu, int kept) {
    double* const v = r.shaped;
    const double low = r.of[MIN_TEMP], high = r.of[MAX_TEMP];
    if (mu < INFINITE) {
        const Mass all = mass_of(r, kept);
        const double least = exp2(-mu) * all.sum;
        for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
            if (v[i] < least && i != all.first) v[i] = 0;
    }
    if (low == 1 && high == 1) return;
    const Mass all = mass_of(r, kept);
    const double entropy = entropy_of(r, v, all.sum, kept);
    const double flat = pow(fmax(entropy / log((double)max(all.count, 2)), 0.0), r.of[TEMP_EXPONENT]);
    const double power = 1 / (low + (high - low) * flat);
    double found[3] = {0, 0, 0};
    found[2] = all.first >= r.begin && all.first < r.end ? v[all.first] : 0.0;
    tell(r, found);
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
        if (v[i] > 0) v[i] = pow(v[i] / found[2], power);
}

// XTC: likely tokens keep w (1 - P), others get w (1 + P x / (1 - x)); the former become negative.
__device__ void spare_unlikely(Row& r, const unsigned* ignored, int kept) {
    double* const v = r.shaped;
    const double share = r.of[XTC_PROBABILITY];
    const double least = fmax(r.of[XTC_THRESHOLD] * mass_of(r, kept).sum, LEAST);
    const auto is_likely = [&](int i) { return v[i] >= least && !has(ignored, r.id(i)); };
    double last[3] = {0, 0, -1};
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
        if (is_likely(i)) last[2] = i;
    last[2] = over_cta<true>(last[2]);
    tell(r, last);
    double mass[2] = {0, 0};
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
        mass[i < last[2] && is_likely(i) ? 0 : 1] += v[i];
    mass[0] = over_cta<false>(mass[0]);
    mass[1] = over_cta<false>(mass[1]);
    tell(r, mass);
    const double more = 1 + share * mass[0] / mass[1];
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
        v[i] *= i < last[2] && is_likely(i) ? share - 1 : more;
}

// Put candidates in order again: those that are negative and those that are positive are in order
// each, so that a place is one's own in its list and that in the other one. Returns how many are
// not dropped; their weights are in `sums`.
__device__ int put_in_order(Row& r, int kept) {
    constexpr double MANY = 1 << 26;  // exact: counts of both kinds in one sum
    double *const v = r.shaped, *const list = r.weights;
    const Sums code = running(r, r.spare, kept, [&](int i) { return v[i] < 0 ? 1.0 : v[i] > 0 ? MANY : 0.0; });
    const double all = code.upto(kept);
    const int unlikely = (int)(all / MANY), likely = (int)(all - unlikely * MANY), count = likely + unlikely;
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) {
        const double upto = code.upto(i + 1);
        const int second = (int)(upto / MANY), first = (int)(upto - second * MANY);
        if (v[i] == 0) {
            const int to = count + i - first - second;
            r.sums[to] = 0, r.sorted[to] = r.id(i);
        } else {
            const int to = v[i] < 0 ? first - 1 : likely + second - 1;
            list[to] = fabs(v[i]), r.listed[to] = r.id(i);
        }
    }
    double none[1] = {0};
    tell(r, none);
    for (int i = r.begin + threadIdx.x; i < r.last(count); i += blockDim.x) {
        const double weight = list[i];
        int to = i;
        if (i < likely) to += first_without(likely, count, [&](int j) { return list[j] > weight; }) - likely;
        else to += first_without(0, likely, [&](int j) { return list[j] >= weight; }) - likely;
        r.sums[to] = weight, r.sorted[to] = r.listed[i];
    }
    tell(r, none);
    return count;
}

// A row's token, and those of its pair: append it to the histories.
__device__ void finish(const Sampler& s, integer row, int id) {
    for (int pair = 0; pair < (s.mixes && s.partner[row] != row ? 2 : 1); ++pair) {
        const integer slot = pair ? s.partner[row] : row;
        const int count = s.counts[slot], active = s.active[slot];
        s.ids[slot] = id;
        s.history[slot * (s.room + 1) + (active > 0 ? count : s.room)] = id < 0 ? (int)s.vocab : id;
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
    const double mu = s.mu[row], typical = r.of[TYPICAL], low = r.of[MIN_TEMP], high = r.of[MAX_TEMP];
    const bool drops = s.ignored && r.of[XTC_PROBABILITY] > 0;
    if (typical < 1 || mu < INFINITE || low != 1 || high != 1 || drops) {
        if (typical < 1) keep_typical(r, sums, kept);
        else
            for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) r.shaped[i] = r.weights[i];
        limit_and_reheat(r, mu, kept);
        if (drops) spare_unlikely(r, s.ignored + row * s.words, kept);
        if (typical < 1 || drops) found = put_in_order(r, kept), weights = r.sums, ids = r.sorted;
        else weights = r.shaped;
        sums = running(r, r.spare, found, [&](int i) { return weights[i]; });
        if (!ids) found = leading(found, [&](int i) { return weights[i] > 0; });
    }
    const double total = sums.upto(found), below = __longlong_as_double(__double_as_longlong(total) - 1);
    const double draw = r.of[SKEW] == 1 ? s.draws[row] : pow(s.draws[row], r.of[SKEW]);
    const double limit = fmin(draw * total, below);
    const int place = min(leading(found, [&](int i) { return sums.upto(i + 1) <= limit; }), found - 1);
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
    extern __shared__ Key sorted[];  // of a power of two; then the arrays of a row
    __shared__ double before[3 * TEAM];
    __shared__ int taken;
    let_the_next_begin();
    wait_for_input();
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
    for (int size = 2; size <= room; size *= 2)
        for (int apart = size / 2; apart; apart /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < room / 2; i += blockDim.x) {
                const int a = i / apart * 2 * apart + i % apart, b = a + apart;
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
    Row r = {most, 0, most, most, 0, 1, nullptr, nullptr, 0, s.table + row * COLUMNS, logits, nullptr,
             ids, ids + room, ids + 2 * room, arrays, arrays + room, arrays + 2 * room, arrays + 3 * room, before};
    choose(s, r, row);
}

// Rows of many candidates, in order. blockIdx is (CTA of a team, team); a team takes row by row.
extern "C" __global__ void __launch_bounds__(1024) choose_all(const Sampler s) {
    __shared__ double before[3 * TEAM];
    let_the_next_begin();
    wait_for_input();
    const int n = (int)s.most, slice = (n + TEAM - 1) / TEAM, begin = min(n, (int)blockIdx.x * slice);
    double* const arrays = s.scratch + blockIdx.y * 5 * s.most;
    int* const ids = (int*)(arrays + 4 * s.most);
    unsigned* const meetings = s.meetings + blockIdx.y;
    Row r = {n, begin, min(n, begin + slice), slice, (int)blockIdx.x, TEAM, meetings,
             s.partial + blockIdx.y * 6 * TEAM, 0, nullptr, nullptr, nullptr, nullptr, ids, ids + n,
             arrays, arrays + n, arrays + 2 * s.most, arrays + 3 * s.most, before};
    for (integer row = blockIdx.y; row < s.rows; row += gridDim.y) {
        r.of = s.table + row * COLUMNS;
        r.logits = s.ordered + row * s.most;
        r.order = s.order + row * s.most;
        choose(s, r, row);
        meet(meetings, blockIdx.x, TEAM);
    }
}

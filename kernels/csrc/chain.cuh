// Truncation and reweighing of ordered candidates: top-k, top-p, typical, XTC and others. Each CTA
// handles its slice; a thread has the same places in every step but `running`.
#include "row.cuh"

// A number in (0, 1) of a draw and an id: SplitMix64.
__device__ __forceinline__ double uniform(double draw, int id) {
    Key x = (Key)(draw * 0x1p53) + ((Key)id + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    return ((double)(x >> 12) + 0.5) * 0x1p-52;
}

// The place that arrives first of `n`: each at a speed of its weight, on an exponential way that
// follows from the draw and its id.
template <class Weight, class Id>
__device__ int first_of(Row& r, int n, double draw, Weight weight, Id id) {
    double best = -INFINITE, found[3] = {0, 0, 0};
    int place = n;
    for (int i = r.begin + threadIdx.x; i < r.last(n); i += blockDim.x) {
        const double speed = weight(i);
        const double time = speed > 0 ? log(uniform(draw, id(i))) / speed : -INFINITE;
        if (time > best) best = time, place = i;
    }
    found[2] = over_cta<true>(best);
    tell(r, found);
    const double least = found[2];
    found[2] = over_cta<true>(best == least ? -(double)place : -(double)n);
    tell(r, found);
    return min(-(int)found[2], n - 1);
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
    if (r.of[TYPICAL] >= 1) {  // off
        for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) r.shaped[i] = w[i];
        return;
    }
    const double mass = sums.upto(kept), bound = r.of[TYPICAL] * mass;
    const double middle = mass * exp(NEAR - entropy_of(r, w, mass, kept));
    const double square = middle * middle;
    const int left = leading(kept, [&](int i) { return w[i] >= middle; });
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) {
        const auto is_beyond = [&](int j) { return w[j] * w[i] > square; };
        double nearer = sums.upto(i);
        if (i >= left) {
            nearer -= sums.upto(first_without(0, left, is_beyond));
        } else {
            const int equal = first_without(0, i, [&](int j) { return w[j] > w[i]; });
            const int after = first_without(i, left, [&](int j) { return w[j] >= w[i]; });
            nearer -= sums.upto(equal);
            nearer += sums.upto(first_without(left, kept, is_beyond)) - sums.upto(after);
        }
        r.shaped[i] = nearer < bound ? w[i] : 0.0;
    }
}

// Mirostat 2: keep p >= 2^-mu, and always the likeliest.
__device__ void limit_surprise(Row& r, double mu, int kept) {
    const Mass all = mass_of(r, kept);
    const double least = exp2(-mu) * all.sum;
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
        if (r.shaped[i] < least && i != all.first) r.shaped[i] = 0;
}

// p^(1/T), T = low + (high - low) (H / ln n)^exponent for n candidates of entropy H.
__device__ void reheat(Row& r, int kept) {
    double* const v = r.shaped;
    const Mass all = mass_of(r, kept);
    const double entropy = fmax(entropy_of(r, v, all.sum, kept), 0.0);
    const double flat = pow(entropy / log((double)max(all.count, 2)), r.of[TEMP_EXPONENT]);
    const double power = 1 / (r.of[MIN_TEMP] + (r.of[MAX_TEMP] - r.of[MIN_TEMP]) * flat);
    double best[3] = {0, 0, 0};
    best[2] = all.first >= r.begin && all.first < r.end ? v[all.first] : 0.0;
    tell(r, best);
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
        if (v[i] > 0) v[i] = pow(v[i] / best[2], power);
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
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x) {
        const bool loses = i < last[2] && is_likely(i);
        mass[0] += loses ? v[i] : 0, mass[1] += loses ? 0 : v[i];
    }
    mass[0] = over_cta<false>(mass[0]);
    mass[1] = over_cta<false>(mass[1]);
    tell(r, mass);
    const double more = 1 + share * mass[0] / mass[1];
    for (int i = r.begin + threadIdx.x; i < r.last(kept); i += blockDim.x)
        v[i] *= i < last[2] && is_likely(i) ? share - 1 : more;
}

// Put candidates in order again: the negative and the positive ones are in order
// each, so that a place is one's own in its list and that in the other one. Returns how many are
// not dropped; their weights are in `sums`.
__device__ int put_in_order(Row& r, int kept) {
    constexpr double MANY = 1 << 26;  // exact: counts of both kinds in one sum
    double *const v = r.shaped, *const list = r.weights;
    const Sums code = running(r, r.spare, kept, [&](int i) {
        return v[i] < 0 ? 1.0 : v[i] > 0 ? MANY : 0.0;
    });
    const double all = code.upto(kept);
    const int unlikely = (int)(all / MANY), likely = (int)(all - unlikely * MANY);
    const int count = likely + unlikely;
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
        const bool is_likely = i < likely;  // and first of equal ones
        const int begin = is_likely ? likely : 0, end = is_likely ? count : likely;
        const int to = i - likely + first_without(begin, end, [&](int j) {
            return is_likely ? list[j] > weight : list[j] >= weight;
        });
        r.sums[to] = weight, r.sorted[to] = r.listed[i];
    }
    tell(r, none);
    return count;
}

// Logit processors: CFG, penalties, bias, DRY and masks. blockIdx is (piece of a row, row).
#include "sampler.cuh"

__device__ __forceinline__ float bounded(float x) { return x < -STRONGEST ? -STRONGEST : x; }

// The greatest logit of a piece, and the sum of exp(l - greatest): excluded ones stay finite.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 2) norms(const Sampler s) {
    overlap_launches();
    const int first = blockIdx.x * PIECE + threadIdx.x, left = (int)s.vocab - first;
    const float* x = s.logits + blockIdx.y * s.step + first;
    float values[PIECE / SELECT_THREADS];
    double greatest = -STRONGEST, sum = 0;
#pragma unroll
    for (int j = 0; j < PIECE / SELECT_THREADS; ++j) {
        values[j] = j * SELECT_THREADS < left ? bounded(x[j * SELECT_THREADS]) : -INFINITE;
        greatest = fmax(greatest, (double)values[j]);
    }
    greatest = over_cta<true>(greatest);
#pragma unroll
    for (int j = 0; j < PIECE / SELECT_THREADS; ++j) sum += exp(values[j] - greatest);
    sum = over_cta<false>(sum);
    double* norm = s.norms + 2 * (blockIdx.y * s.pieces + blockIdx.x);
    if (threadIdx.x == 0) norm[0] = greatest, norm[1] = sum;
}

// log of the sum of exp over a row, by a warp.
__device__ double norm_of(const Sampler& s, integer row) {
    const double* norm = s.norms + 2 * row * s.pieces;
    double greatest = -STRONGEST, sum = 0;
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < s.pieces; i += 32) greatest = fmax(greatest, norm[2 * i]);
    greatest = over_warp<true>(greatest);
    for (int i = lane; i < s.pieces; i += 32) sum += norm[2 * i + 1] * exp(norm[2 * i] - greatest);
    return log(over_warp<false>(sum)) + greatest;
}

// For each position of a history, how long the repetition is that ends there and is followed by an
// id that may follow: of the history's end, within the range of DRY and without breakers.
extern "C" __global__ void find_repetitions(const Sampler s) {
    __shared__ int suffix[MOST_REPEATED];
    overlap_launches();
    const integer row = blockIdx.y;
    const double* of = s.table + row * COLUMNS;
    const int* ids = s.history + row * (s.room + 1);
    const unsigned* broken = s.breakers + row * s.breaker_words;
    const int count = s.counts[row], first = blockIdx.x * STRETCH;
    const int most = of[DRY_MULTIPLIER] > 0 ? (int)of[DRY_MAX_NGRAM] : 0;
    const int start = (int)fmax(count - of[DRY_RANGE], 0.0), end = min(first + STRETCH, count - 1);
    for (int i = threadIdx.x; i < most; i += blockDim.x) {
        const int id = i < count ? ids[count - 1 - i] : -1;
        suffix[i] = id < 0 || has(broken, id) ? -1 : id;  // equals no id
    }
    __syncthreads();
    int longest = 0;
    for (int p = first + threadIdx.x; p < end; p += blockDim.x) {
        int length = 0;
        while (length < most && p - length >= start && ids[p - length] == suffix[length]) ++length;
        if (length && has(broken, ids[p + 1])) length = 0;
        s.lengths[row * s.room + p] = length;
        longest = max(longest, length);
    }
    longest = (int)over_cta<true>(longest);
    if (threadIdx.x == 0) s.longest[row * s.stretches + blockIdx.x] = longest;
}

// How often an id occurs: in steps of the penalties (64 bits), its newest place + 1, and after the
// longest repetition.
struct Seen { unsigned low, high, latest, times; };

struct Penalties {
    const double* of;  // the row's settings
    int count;         // ids of its history
    bool fades;        // some penalty is on
    int longest;       // repetition; 0: DRY takes nothing
    double dry;        // what DRY takes for each time
};

// A token counts `unit` steps within the range, and one less for each token further back.
__device__ __forceinline__ double steps_of(const Penalties& p, int place) {
    const double left = p.of[REPETITION_RANGE] - (p.count - place);
    return fmax(fmin(left, p.of[REPETITION_DECAY]), 0.0);
}

__device__ Penalties penalties_of(const Sampler& s, integer row) {
    const double* of = s.table + row * COLUMNS;
    const bool is_seen = of[PRESENCE_PENALTY] != 0 || of[FREQUENCY_PENALTY] != 0;
    const bool fades = s.penalizes && (is_seen || of[REPETITION_PENALTY] != 1);
    Penalties p = {of, s.counts[row], fades, 0, 0.0};
    if (s.longest && of[DRY_MULTIPLIER] > 0) {
        const int* found = s.longest + row * s.stretches;
        for (int i = 0; i * STRETCH < p.count - 1; ++i) p.longest = max(p.longest, found[i]);
        const double excess = p.longest - of[DRY_ALLOWED_LENGTH];
        p.dry = of[DRY_MULTIPLIER] * fmin(pow(of[DRY_BASE], excess), STRONGEST);
        p.dry = fmin(p.dry, STRONGEST);
        if (excess < 0) p.longest = 0;
    }
    return p;
}

__device__ __forceinline__ void see(Seen& id, const Penalties& p, int place, const short* lengths) {
    if (p.fades) {
        const unsigned long long steps = (unsigned long long)steps_of(p, place);
        const unsigned low = (unsigned)steps, before = low ? atomicAdd(&id.low, low) : 0;
        const unsigned high = (unsigned)(steps >> 32) + (before + low < before);
        if (high) atomicAdd(&id.high, high);
        atomicMax(&id.latest, place + 1);
    }
    const bool repeats = p.longest && place && lengths[place - 1] == p.longest;
    if (repeats) atomicAdd(&id.times, 1);
}

// Count the ids of a history that lie in [first, first + COUNTED): integers, in any order.
__device__ void count(const Sampler& s, const Penalties& p, integer row, int first, Seen* seen) {
    constexpr int READ = 8;  // ids that a thread has in flight
    const int* ids = s.history + row * (s.room + 1);
    const short* lengths = s.lengths + row * s.room;
    for (int i = threadIdx.x; i < COUNTED; i += blockDim.x) seen[i] = {};
    __syncthreads();
    for (int base = threadIdx.x; base < p.count; base += READ * blockDim.x) {
        unsigned at[READ];
#pragma unroll
        for (int j = 0; j < READ; ++j) {
            const int place = base + j * blockDim.x;
            at[j] = place < p.count ? ids[place] - first : COUNTED;
        }
#pragma unroll
        for (int j = 0; j < READ; ++j)
            if (at[j] < COUNTED) see(seen[at[j]], p, base + j * blockDim.x, lengths);
    }
    __syncthreads();
}

// As its newest token counts, an id's logit l becomes l / r or l · r and loses the presence
// penalty; and the frequency penalty for each of its tokens.
__device__ __forceinline__ float penalized(float x, const Penalties& p, const Seen& seen) {
    const double unit = p.of[REPETITION_DECAY], newest = steps_of(p, seen.latest - 1) / unit;
    const double every = (double)((unsigned long long)seen.high << 32 | seen.low) / unit;
    const double factor = __dadd_rn(__dmul_rn(p.of[REPETITION_PENALTY] - 1, newest), 1);
    double found = x > 0 ? x / factor : x * factor;
    found = __dsub_rn(found, __dmul_rn(p.of[PRESENCE_PENALTY], newest));
    found = __dsub_rn(found, __dmul_rn(p.of[FREQUENCY_PENALTY], every));
    return found > STRONGEST ? STRONGEST : (float)found;
}

// Copy a piece of the logits: mixed with the partner's, penalized, biased and masked. Everything is
// read before anything is written, so that a thread has many reads in flight.
extern "C" __global__ void __launch_bounds__(COUNT_THREADS) adjust(const Sampler s) {
    extern __shared__ Seen seen[];
    __shared__ double norms[2];
    overlap_launches();
    constexpr int EACH = COUNTED / COUNT_THREADS;
    const integer row = blockIdx.y;
    const int start = blockIdx.x * COUNTED, first = start + threadIdx.x;
    const int left = (int)s.vocab - first;
    const float* x = s.logits + row * s.step + first;
    float values[EACH];
    int flags = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        values[j] = j * COUNT_THREADS < left ? x[j * COUNT_THREADS] : 0;
        flags |= j * COUNT_THREADS < left ? flags_of(values[j]) : 0;
    }
    if (s.mixes) {
        const integer partner = s.partner[row];
        const double scale = partner == row ? 1 : s.table[row * COLUMNS + CFG_SCALE];
        const int warp = threadIdx.x / 32;
        const double norm = warp < 2 ? norm_of(s, warp ? partner : row) : 0;
        if (warp < 2 && threadIdx.x % 32 == 0) norms[warp] = norm;
        __syncthreads();
        const double both = __dadd_rn(__dmul_rn(norms[0], scale), __dmul_rn(norms[1], 1 - scale));
        const float own = (float)scale, share = (float)(1 - scale);
        const float off = partner == row ? 0 : (float)both;
        const float* other = s.logits + partner * s.step + first;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const float theirs = j * COUNT_THREADS < left ? bounded(other[j * COUNT_THREADS]) : 0;
            const float mine = __fmul_rn(bounded(values[j]), own);
            values[j] = __fsub_rn(__fadd_rn(mine, __fmul_rn(theirs, share)), off);
        }
    }
    const Penalties p = penalties_of(s, row);
    const bool counts = p.fades || p.longest;
    if (counts) count(s, p, row, start, seen);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        if (j * COUNT_THREADS >= left) break;
        const int id = first + j * COUNT_THREADS;
        const Seen known = counts ? seen[id - start] : Seen{};
        if (known.latest) values[j] = penalized(values[j], p, known);
        if (s.bias) values[j] += s.bias[row * s.width + id];
        if (known.times) {
            const double times = fmin((double)known.times, p.of[DRY_COUNTS]);
            values[j] = (float)__dsub_rn(values[j], __dmul_rn(p.dry, times));
        }
        if (s.allowed && !has(s.allowed + row * s.words, id)) values[j] = -INFINITE;
    }
    float* const adjusted = s.adjusted + row * s.vocab + first;
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (j * COUNT_THREADS < left) adjusted[j * COUNT_THREADS] = values[j];
    put_flags(s.flags + row * s.flagged + blockIdx.x, flags);
}

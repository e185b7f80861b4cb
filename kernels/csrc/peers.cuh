// Exchanges between GPUs of one host: each writes what it has into a box in the memory of every
// other one, beside each 4 bytes the number of the exchange, and reads its own boxes until that
// number is there. So one way through the link is all the time it takes, and there are no fences. A
// box has two halves, for odd and for even numbers: who writes the next but one has read the next,
// which the reader wrote after it had read this one.

typedef unsigned long long Word;  // 4 bytes, and above them a number

struct Peers {
    Word* boxes[MOST_RANKS];  // in the memory of each: [number % 2][sender][room]
    unsigned* counters;       // [CTA] of the last exchange; behind them: not 0 after a failure
    int* failed;              // the same in main memory
    integer patience;         // ns
    int rank, count, room;    // room: words
};

struct Gather {  // columns of all ranks that a chain of products reads
    const unsigned* own;  // (rows, words), those of this rank; or null
    half_bits* all;       // (rows, 2 · words of all), where CTAs share them; or null
    const int* to;        // where each of them goes in its row then
    int words;
    int sums;             // whether the launch adds up results of ranks behind it
};

struct Exchange {
    const Peers& p;
    unsigned number;

    __device__ __forceinline__ Exchange(const Peers& p, unsigned number) : p(p), number(number) {}
    __device__ __forceinline__ explicit Exchange(const Peers& p) : p(p), number(0) { begin(); }
    __device__ __forceinline__ void begin() {
        number = __ldcg(p.counters + blockIdx.x);
        next();
    }
    __device__ __forceinline__ void next() {
        if (!++number) number = 2;  // 0 stands beside what nobody wrote
    }
    __device__ __forceinline__ Word* box(int of, int from) const {
        return p.boxes[of] + ((integer)(number % 2) * p.count + from) * p.room;
    }
    // Send a number, place `at` of all.
    __device__ __forceinline__ void send(integer at, float value) const {
        const Word word = (Word)number << 32 | __float_as_uint(value);
#pragma unroll 1
        for (int r = 0; r < p.count; ++r)
            if (r != p.rank)
                asm volatile("st.relaxed.sys.global.u64 [%0], %1;"
                             ::"l"(box(r, p.rank) + at), "l"(word) : "memory");
    }
    // Send 4 words, two pairs that are `apart`.
    __device__ __forceinline__ void send(integer at, uint4 v, int apart = 2) const {
        const Word beside = (Word)number << 32;
#pragma unroll 1
        for (int r = 0; r < p.count; ++r) {
            if (r == p.rank) continue;
            Word* to = box(r, p.rank) + at;
            asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                         ::"l"(to), "l"(beside | v.x), "l"(beside | v.y) : "memory");
            asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                         ::"l"(to + apart), "l"(beside | v.z), "l"(beside | v.w) : "memory");
        }
    }
    // Wait for words of another rank: pairs, each `apart` from the one before.
    template <int COUNT = 4>
    __device__ __forceinline__ void receive(int from, integer at, unsigned* values,
                                            int apart = 2) const {
        const Word* box_at = box(p.rank, from) + at;
        Word w[COUNT], begun = 0;
        for (unsigned tries = 1;; ++tries) {
            bool is_there = true;
#pragma unroll
            for (int i = 0; i < COUNT; i += 2)
                asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                             : "=l"(w[i]), "=l"(w[i + 1]) : "l"(box_at + i / 2 * apart) : "memory");
#pragma unroll
            for (int i = 0; i < COUNT; ++i) is_there &= (unsigned)(w[i] >> 32) == number;
            if (is_there || (tries % 256 == 0 && is_late(begun))) break;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = (unsigned)w[i];
    }
    // Gather columns; CTAs meet before they read them.
    __device__ __forceinline__ void gather(const Gather& g, int rows) const {
        const int step = gridDim.x * blockDim.x, count = rows * g.words;
        const int first = threadIdx.x * gridDim.x + blockIdx.x;
#pragma unroll 1
        for (int i = first; i < count; i += step) send(i, __uint_as_float(__ldcg(g.own + i)));
#pragma unroll 1
        for (int turn = 0; turn < p.count; ++turn) {
            const int r = (p.rank + turn) % p.count;
#pragma unroll 1
            for (int i = first; i < count; i += step) {
                const int row = i / g.words, place = 2 * (r * g.words + i % g.words);
                const int low = __ldg(g.to + place), high = __ldg(g.to + place + 1);
                const bool there = true;
                float value;
                if (turn) receive_at<1>(r, &i, &there, &value);
                else value = __uint_as_float(__ldcg(g.own + i));
                half_bits* of_row = g.all + (integer)row * 2 * p.count * g.words;
                of_row[low] = (half_bits)__float_as_uint(value);
                of_row[high] = (half_bits)(__float_as_uint(value) >> 16);
            }
        }
    }
    // Send this rank's columns, of a multiple of 4 words a row, for CTAs that wait by themselves.
    __device__ __forceinline__ void send_columns(const Gather& g, int rows) const {
        const int pieces = rows * g.words / 4;
#pragma unroll 1
        for (int i = (int)grid_thread(); i < pieces; i += gridDim.x * blockDim.x)
            send(4 * i, __ldcg((const uint4*)g.own + i));
    }
    // Wait for columns 8 · piece and on of up to ROWS rows.
    template <int ROWS>
    __device__ __forceinline__ void columns(const Gather& g, int rows, int piece, uint4* v) const {
        const int from = 4 * piece / g.words, first = 4 * piece % g.words;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            const integer at = (integer)r * g.words + first;
            if (from == p.rank) {
                v[r] = __ldcg((const uint4*)(g.own + at));
            } else {
                unsigned words[4];
                receive(from, at, words);
                v[r] = {words[0], words[1], words[2], words[3]};
            }
        }
    }
    // Add up eight numbers of each rank, in their order; place `at` of all, a multiple of 4.
    __device__ __forceinline__ void add(integer at, float (&values)[8]) const {
        unsigned own[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = __float_as_uint(values[i]);
        send(at, uint4{own[0], own[1], own[2], own[3]});
        send(at + 4, uint4{own[4], own[5], own[6], own[7]});
#pragma unroll 1
        for (int r = 0; r < p.count; ++r) {
            unsigned parts[8];
            if (r != p.rank) receive<8>(r, at, parts);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float part = __uint_as_float(r == p.rank ? own[i] : parts[i]);
                values[i] = r ? __fadd_rn(values[i], part) : part;
            }
        }
    }
    // The sums of all ranks' numbers at COUNT places, in their order; there: which of them exist;
    // values: this one's, then the sums.
    template <int COUNT>
    __device__ __forceinline__ void add(const int* at, const bool* there, float* values) const {
        float sums[COUNT];
#pragma unroll 1
        for (int r = 0; r < p.count; ++r) {
            float parts[COUNT];
            if (r != p.rank) receive_at<COUNT>(r, at, there, parts);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const float part = r == p.rank ? values[i] : parts[i];
                sums[i] = r ? __fadd_rn(sums[i], part) : part;
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = sums[i];
    }
    // The next hidden state of a sum, rounded once.
    __device__ __forceinline__ half_bits added(float sum, float multiplier, bool is_added,
                                               half_bits hidden) const {
        const float value = __fmul_rn(sum, multiplier);
        return to_half(is_added ? __fadd_rn(from_half(hidden), value) : value);
    }
    // Count the exchange; every thread of every CTA calls it, behind its last use.
    __device__ __forceinline__ void end() const {
        __syncthreads();
        if (threadIdx.x == 0) p.counters[blockIdx.x] = number;
        for (int i = gridDim.x + threadIdx.x; blockIdx.x == 0 && i < EXCHANGE_CTAS; i += blockDim.x)
            p.counters[i] = number;
    }

private:
    template <int COUNT>
    __device__ __forceinline__ void receive_at(int from, const int* at, const bool* there,
                                               float* parts) const {
        const Word* own = box(p.rank, from);
        Word w[COUNT], begun = 0;
        for (unsigned tries = 1;; ++tries) {
            bool is_there = true;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (there[i])
                    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
                                 : "=l"(w[i]) : "l"(own + at[i]) : "memory");
#pragma unroll
            for (int i = 0; i < COUNT; ++i) is_there &= !there[i] || (unsigned)(w[i] >> 32) == number;
            if (is_there || (tries % 256 == 0 && is_late(begun))) break;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) parts[i] = __uint_as_float((unsigned)w[i]);
    }
    // Whether waiting is in vain: for too long, or because an earlier exchange has failed.
    __device__ __forceinline__ bool is_late(Word& begun) const {
        volatile unsigned* is_lost = p.counters + EXCHANGE_CTAS;
        Word now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (!begun) begun = now;
        const bool ends = *is_lost || *(volatile int*)p.failed;  // the host may have set it
        if (!ends && now - begun < (Word)p.patience) return false;
        *(volatile int*)p.failed = 1, *is_lost = 1;
        return true;
    }
};

// Arguments of product.cu, and the share of the work that a CTA and a warp have: product.py
// computes the former, the latter follow from a CTA's and a warp's number.

struct Matrix {
    const byte* words;          // [tile] of `tile_bytes`, see PackedMatrix
    const half_bits* bias;      // (columns), or null
    const half_bits* residual;  // (rows, columns) to add to the product, or null
    half_bits* y;               // (rows, columns), or null
    float* exact;               // y before it is rounded, or null
    half_bits* copy;            // y again, columns as `to` says; or null
    float* partial;             // [tile][piece][row][32 columns], see Work::piece
    int columns, tile_bytes;
    // Of a matrix, or of two whose tiles alternate, in the first:
    const int2* lists;          // [part] of the stage's `words`: see below
    int* arrived;               // [tile][row] of pieces, zero before and after
    int tiles, units, each;     // units: of work in a tile; each: units of a CTA
    int first_cta, pieces;      // pieces: most CTAs of a part that share a tile
};

struct Stage {  // a product with matrices that share x
    Matrix of[MOST_MATRICES];
    const half_bits* x;     // (rows, k), in the order of the matrices' rows
    const half_bits* norm;  // weights (k) in this order, if x is to be normalized; or null
    const int* place;       // (k), place of each in-feature; null if x is in this order; of `hidden`
    const int* to;          // (columns), for `copy`
    // If x is a result, of a few rows, whose norm is added to hidden states; these are multiplied:
    const half_bits* after;   // weights (k) of that norm, in the order of the rows; or null
    const int* order;         // (k), the in-feature of each row
    const half_bits* hidden;  // (rows, k) in the order of in-features; or null: zeros
    half_bits* sum;           // (rows, k), the same
    int k, length, ctas, parts;         // length: panels of a part; ctas: of a part
    int words, list_at;                 // words: of a list; list_at: its place in shared memory
    int activation;  // not 0: y = activation(x Q of the first) · (x Q of the second)
    float eps, multiplier;  // multiplier: of the result, before it is added
    float after_eps, after_multiplier;  // the same of x, where its norm is added
};

struct Chain {
    Stage stages[MOST_CHAINED];
    unsigned* meetings;            // see meet
    int count, rows;
    int slots, slot_bytes;         // slots: steps that a warp has in flight
    int words, tiles;              // words: of all lists of a CTA; tiles: most per CTA
};

// A list has the steps of a tile in a part, of two tiles if these alternate: the number of all, that
// of the first; then for each step what Step says, and: place of its codes in a tile, in units of 16
// bytes | panel of the part << 20.

// The matrix whose tiles a CTA has: the first of two that alternate, or one of several.
__device__ __forceinline__ const Matrix* matrices_of(const Stage& stage) {
    const int cta = blockIdx.x % stage.ctas;
    int which = 0;
    while (which + 1 < MOST_MATRICES && cta >= stage.of[which + 1].first_cta) ++which;
    return stage.of + which;
}

// A CTA's work in a stage: adjacent units of tiles, which are numbered in order. A later CTA ends the
// tile that this one begins; that is done first. Of each part the same CTAs share a tile.
struct Work {
    const Matrix* of;  // tiles of one matrix, or of two that alternate
    const int2* list;
    int together, part, cta;
    int first, tiles, held;  // first: tile; tiles: that it ends; held: and begins
    int begin, begun, end;   // steps of the part; begun: of the tile that another CTA ends

    __device__ __forceinline__ Work(const Stage& stage, const int2* lists)
        : of(matrices_of(stage)), list(lists + stage.list_at) {
        together = stage.activation ? 2 : 1, part = blockIdx.x / stage.ctas;
        cta = blockIdx.x % stage.ctas - of->first_cta;
        const unsigned units = of->units, all = part < stage.parts ? of->tiles * units : 0;
        const unsigned from = min(cta * of->each, all), to = min(from + of->each, all);
        const int last = to / units, steps = list->x;
        first = from / units, tiles = last - first, held = tiles + (from < to && to % units);
        auto step = [&](int tile, unsigned unit) {
            return tile * steps + (int)(unit == 0 || units == steps ? unit : unit * steps / units);
        };
        begin = step(first, from % units), end = step(last, to % units);
        begun = max(begin, last * steps);
    }
    __device__ __forceinline__ bool hands_over() const { return held > tiles; }
    __device__ __forceinline__ const Matrix& matrix(bool is_second) const { return of[is_second]; }
    // The sums of a tile that this CTA or another one has: those that have the tile, in order of parts.
    __device__ __forceinline__ int first_cta_of(int tile) const {
        return (unsigned)(tile * of->units) / of->each;
    }
    __device__ __forceinline__ integer piece(const Stage& stage, int tile, int part, int turn) const {
        return (integer)tile * stage.parts * of->pieces + part * of->pieces + turn;
    }
};

// A warp's steps of a CTA's work, one after the other: of the tile that it does not end, or of the others.
struct Walk {
    const int2* step;
    int tile, left;
    bool is_second;  // of two matrices that alternate

    __device__ __forceinline__ Walk(const Work& work, bool is_begun) {
        const unsigned warp = threadIdx.x / 32, all = work.end - work.begin;
        const unsigned rest = work.end - work.begun, steps = work.list->x;
        unsigned bounds[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned before = (warp + i) * all / CTA_WARPS;
            const unsigned of_rest = rest ? before * rest / all : 0;
            bounds[i] = is_begun ? work.begun + of_rest : work.begin + before - of_rest;
        }
        const unsigned at = bounds[0] % steps;
        tile = bounds[0] / steps, left = bounds[1] - bounds[0];
        step = work.list + 1 + at, is_second = at >= work.list->y;
    }
    __device__ __forceinline__ const byte* words(const Work& work) const {
        const Matrix& m = work.matrix(is_second);
        return m.words + (integer)tile * m.tile_bytes;
    }
    // Go on behind a step; return whether another tile begins.
    __device__ __forceinline__ bool next(const Work& work, int kind) {
        ++step, --left;
        if (!(kind >> 7 & 1)) return false;
        is_second = work.together == 2 && !is_second;
        if (!is_second) ++tile, step = work.list + 1;
        return true;
    }
};

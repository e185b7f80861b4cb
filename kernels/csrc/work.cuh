// Arguments of product.cu, and the share of the work that a CTA and a warp have: product.py and
// shares.py compute them.

// A warp's share of the tiles of a CTA, in sequence, and in each the blocks of a part of the rows.
// It may begin and end within a tile; in each tile it has one segment.
struct Share {
    int tile, segments;  // the CTA's tile where it begins; number of its tiles
    int words, row;      // its start: bytes within that tile, row of the part
    int begin[2];        // per matrix that alternates: where the part begins in a tile, bytes
    int units[2];        // the same: into how many a tile's part is divided among warps
    int kinds[1];        // per step, see Step
};

struct Matrix {
    const byte* words;          // [tile] of `tile_bytes`, see PackedMatrix
    const int* shares;          // [part][warp] of `words`, see Share
    const half_bits* bias;      // (columns), or null
    const half_bits* residual;  // (rows, columns) to add to the product, or null
    half_bits* y;               // (rows, columns), or null
    float* exact;               // y before it is rounded, or null; of this rank, if there are others
    half_bits* copy;            // y again, columns as `to` says; or null
    float* partial;             // [tile][part][row][32 columns]
    int* arrived;               // [CTA of a part], zero before and after
    int columns, tile_bytes;
    int first_tile, tiles;      // of this stage: the first, and the end
    int each, first_cta;        // each: tiles per CTA
};

struct Stage {  // a product with matrices that share x, or a round of one with many tiles
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
    int k, length, ctas, parts;         // length: panels of a part
    int words, share_at;                // ints of a share; where it lies in a warp's
    int exchanges;   // whether ranks add up their results, see Peers
    int activation;  // not 0: y = activation(x Q of the first) · (x Q of the second)
    float eps, multiplier;  // multiplier: of the result, before it is added
    float after_eps, after_multiplier;  // the same of x, where its norm is added
};

struct Chain {
    Stage stages[MOST_STAGES];
    unsigned* meetings;            // see meet
    Peers peers;
    Gather gather;
    int count, rows;
    int slots, slot_bytes;         // slots: steps that a warp has in flight
    int words, tiles;              // words: per warp, all stages; tiles: most per CTA
};

// The matrix whose tiles a CTA has: the first of two that alternate, or one of several.
__device__ __forceinline__ const Matrix* matrices_of(const Stage& stage) {
    const int cta = blockIdx.x % stage.ctas;
    int which = 0;
    while (which + 1 < MOST_MATRICES && cta >= stage.of[which + 1].first_cta) ++which;
    return stage.of + which;
}

// A CTA's, and its warp's, work in a stage.
struct Work {
    const Matrix* of;  // tiles of one matrix, or of two that alternate
    const Share* share;
    int together, part, first, tiles, segments;

    __device__ __forceinline__ Work(const Stage& stage, const int* own) {
        together = stage.activation ? 2 : 1, part = blockIdx.x / stage.ctas;
        of = matrices_of(stage);
        first = of->first_tile + (blockIdx.x % stage.ctas - of->first_cta) * of->each;
        tiles = part < stage.parts ? max(0, min(of->each, of->tiles - first)) * together : 0;
        share = (const Share*)(own + stage.share_at);
        segments = min(share->segments, tiles - share->tile);
    }
    __device__ __forceinline__ const Matrix& matrix(int i) const {
        return of[together == 2 ? i % 2 : 0];
    }
    __device__ __forceinline__ integer tile(int i) const {
        return first + (together == 2 ? i / 2 : i);
    }
    __device__ __forceinline__ const byte* words(int segment) const {
        const int i = share->tile + segment;
        const Matrix& m = matrix(i);
        return m.words + tile(i) * m.tile_bytes +
               (segment ? share->begin[together == 2 ? i % 2 : 0] : share->words);
    }
};

// The warps whose last segment is in tile i of a CTA, as bits, and whether one continues past it.
struct Parts {
    u32 last;
    bool goes_on;
    __device__ __forceinline__ Parts(const Work& work, int i) : last(0), goes_on(false) {
        const int *units = work.share->units, each = work.of->each;
        const int of_pair = units[0] + (work.together == 2 ? units[1] : 0), all = each * of_pair;
        const int tile = i / work.together * of_pair + (i % work.together ? units[0] : 0);
        const int tile_end = tile + units[i % work.together];
        for (int w = 0; w < CTA_WARPS; ++w) {
            const int begin = w * all / CTA_WARPS, end = (w + 1) * all / CTA_WARPS;
            if (max(begin, tile) >= min(end, tile_end)) continue;
            if (end > tile_end) goes_on = true;
            else last |= 1u << w;
        }
    }
};

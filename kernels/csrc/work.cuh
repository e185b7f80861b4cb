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
    const int4* shares;         // [part][CTA][1 + CTA_WARPS], see Work and Walk
    int* arrived;               // [tile][row] of pieces, zero before and after
    int tiles, ctas, first_cta; // ctas: of a part
    int pieces;                 // most CTAs of a part that share a tile
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

// A list has the steps of a tile in a part, of two tiles if these alternate: for each what Step says,
// and: place of its codes in a tile, in units of 16 bytes | panel of the part << 20.

// Whose tiles a CTA has of a stage: of a matrix, or of two that alternate.
struct Place {
    const Matrix* of;
    int part, cta;

    __device__ __forceinline__ explicit Place(const Stage& stage) {
        part = stage.parts == 1 ? 0 : blockIdx.x / stage.ctas;
        cta = blockIdx.x - part * stage.ctas;
        int which = 0;
        while (which + 1 < MOST_MATRICES && cta >= stage.of[which + 1].first_cta) ++which;
        of = stage.of + which, cta -= of->first_cta;
    }
    __device__ __forceinline__ bool has_work(const Stage& stage) const {
        return part < stage.parts && cta < of->ctas;
    }
};

// A CTA's work in a stage: adjacent steps of tiles, which are numbered in order. A later CTA ends the
// tile that this one begins; that is done first. Of each part the same CTAs share a tile.
struct Work {
    const Matrix* of;
    const int2* list;
    const int4* shares;  // of its warps
    int together, part;
    int first, tiles, held;  // first: tile; tiles: that it ends; held: and begins
    int before;              // CTAs of the part that have the first tile before this one

    __device__ __forceinline__ Work(const Stage& stage, const int2* lists, const int4* all) {
        const Place place(stage);
        of = place.of, part = place.part, together = stage.activation ? 2 : 1;
        list = lists + stage.list_at, shares = all + 1;
        first = tiles = held = before = 0;
        if (!place.has_work(stage)) return;
        const int4 own = *all;
        first = own.x, tiles = own.y, held = tiles + own.z, before = own.w;
    }
    __device__ __forceinline__ bool hands_over() const { return held > tiles; }
    __device__ __forceinline__ const Matrix& matrix(bool is_second) const { return of[is_second]; }
    __device__ __forceinline__ int before_of(int tile) const { return tile == first ? before : 0; }
    // Where the sums of a tile are that another CTA ends: those of parts, in each of CTAs in order.
    __device__ __forceinline__ integer piece(const Stage& stage, int tile, int part, int turn) const {
        return ((integer)tile * stage.parts + part) * of->pieces + turn;
    }
};

// A warp's steps of a CTA's work, one after the other: of the tile that it does not end, or of the
// others. Its share has for both: the first step's place in the list | whether it is of the second
// matrix << 15 | tile << 16; and the number of steps.
struct Walk {
    const int2* step;
    int tile, left;
    bool is_second;  // of two matrices that alternate

    __device__ __forceinline__ Walk(const Work& work, bool is_begun) : left(0) {
        if (!work.held) return;
        const int2 own = ((const int2*)(work.shares + threadIdx.x / 32))[!is_begun];
        step = work.list + (own.x & 0x7fff), is_second = own.x >> 15 & 1;
        tile = (unsigned)own.x >> 16, left = own.y;
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
        if (!is_second) ++tile, step = work.list;
        return true;
    }
};

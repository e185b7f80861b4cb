// What the launches of a layer's experts share: tables of its experts, and items, which are an
// expert with up to ITEM_ROWS of its tokens. experts.py makes them.

struct Side {  // matrices of an expert that are multiplied together, two tiles at a time
    const byte* words[2];  // [tile] of `tile_bytes`, see PackedMatrix: gate and up, or down twice
    const int4* steps;     // kind (see Step), bytes before it in a tile, panels before it in x
    int tile_bytes[2];
    int pairs, parts;      // pairs of tiles; into how many the rows of down are divided
    int begins[MOST_BEGINS];    // in `steps`: of gate, of up, the end; or of each part, the end
};

struct Expert {
    Side up, down;
    const half_bits* place;    // (hidden), of an in-feature in x, see `staged_at`
    const half_bits* to;       // (inner), of a column of gate and up in what down reads
    const half_bits* bias[3];  // of gate, up, down; or null
    int inner, pad;            // columns of gate and up
};

struct Item {
    int expert, rows, first;  // first: of its tokens in `assigned`
    int begin[2], count[2];   // units before this item and of it, in the launches for up and down
    int pad;
};

struct Experts {
    const Expert* of;          // the local ones, then the shared one if there is one; their steps
    const integer* places;     // (experts), of an id in `of`, or -1; null: all are here
    const half_bits* hidden;   // (rows, hidden), to which the result is added
    const half_bits* entering; // the same, or normalized
    const half_bits* norm;     // weights (hidden), if the router normalizes; or null
    half_bits* x;              // (rows, hidden), normalized
    const float* router;       // (experts, hidden), then a row for the shared one's gate, if it has one
    const float *bias, *correction;  // (experts), or null
    float* logits;             // (rows, experts + 1)
    float* weights;            // (rows, slots), of the chosen experts, then of the shared one
    int* assigned;             // (rows · slots), row · slots + slot, by expert
    Item* items;
    int* totals;               // of items, and of units for up and down
    half_bits* inner;          // (rows · slots, most inner), in the order of down's rows, `staged_at`
    float* partial;            // (rows, shares, hidden): what the experts' parts add
    half_bits* sum;            // (rows, hidden), the result
    float* part;               // (rows, hidden), the result if not all experts are here
    int* added;                // (rows), shares of a row then
    int* arrived;              // CTAs of the router, zero before and after
    unsigned* meetings;        // see meet
    int table_bytes, rows, size, experts, held, top, slots;  // size: hidden; held: experts that are here
    int gated;                                   // whether the shared one is
    int most_inner, part_rows, shares;           // part_rows: of down in a part; shares: of a token
    int scores, groups, top_groups, scales_input;
    int activation, ring_slots, x_bytes, turns;  // activation 0: clamped swiglu; turns: units with sums
    float eps, norm_power, least_norm, scaling, multiplier;  // norm_power 0: none
};

// Numbers of 8 are stored in the order in which `paired` has them.
__device__ __forceinline__ int staged_at(int place) {  // bytes, in row 0 of ITEM_ROWS
    return (place >> 5) * (ITEM_ROWS * 64) + (place & 31) * 2;
}

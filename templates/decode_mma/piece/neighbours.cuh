// A block's part of the work: split `split` of `cut.splits`, for the rows `rows`. Neighbouring blocks
// work on neighbouring heads of the same keys.
struct Piece {
    Cut cut;
    int split;
    Rows rows;
    int tile_begin, tile_end;  // counted from the sequence's first tile

    DEVICE Piece(const Params& p, const Cut& sequence, int within)
        : cut(sequence), split(quotient(within, unsplit_pieces(p, sequence.queries.count))),
          rows(p, sequence, within - split * unsplit_pieces(p, sequence.queries.count)) {
        const int tiles = tile_count(p, cut.queries.count, cut.length), each = quotient(tiles, cut.splits);
        const int longer = tiles - each * cut.splits;  // this many splits have a tile more
        tile_begin = split * each + min_of(split, longer);
        tile_end = tile_begin + each + int(split < longer);
    }
};

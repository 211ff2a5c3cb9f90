// Whether the splits of the same rows are the blocks of a cluster, in order: wherever the host has counted them. (Then the
// splits of the next rows follow, else neighbours work on neighbouring heads of the same keys.)
DEVICE bool in_cluster(const Params& p, const Cut& cut) { return uniform(p) && cut.splits > 1; }

// A block's part of the work: split `split` of `cut.splits`, for the rows `rows`.
struct Piece {
    Cut cut;
    int split;
    Rows rows;
    int tile_begin, tile_end;  // counted from the sequence's first tile

    DEVICE Piece(const Params& p, const Cut& sequence, int within)
        : Piece(p, sequence, within, in_cluster(p, sequence)) {}
    DEVICE Piece(const Params& p, const Cut& sequence, int within, bool clustered)
        : cut(sequence), split(clustered ? within - quotient(within, cut.splits) * cut.splits
                                         : quotient(within, unsplit_pieces(p, sequence.queries.count))),
          rows(p, sequence, clustered ? quotient(within, cut.splits)
                                      : within - split * unsplit_pieces(p, sequence.queries.count)) {
        const int tiles = tile_count(p, cut.queries.count, cut.length), each = quotient(tiles, cut.splits);
        const int longer = tiles - each * cut.splits;  // this many splits have a tile more
        tile_begin = split * each + min_of(split, longer);
        tile_end = tile_begin + each + int(split < longer);
    }
};

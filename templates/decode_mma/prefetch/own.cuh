// Has L2 fetch what this block's piece begins with, whatever lengths say by then.
DEVICE void prefetch_piece(const Params& p) {
    if (p.prefetch_tiles == 0) return;
    const Cut cut = cut_of_piece<Guessing>(p, block_id());
    if (cut.batch == p.batch) return;
    const Piece piece(p, cut, block_id() - cut.first_piece);
    prefetch_piece(p, piece, Tiles(Mask(p, cut.queries.count, cut.length), cut.queries.count));
}

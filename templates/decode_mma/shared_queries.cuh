// Starts copying the block's queries; rows that do not exist, and columns of another head, become zeros.
DEVICE void load_q(const QTile& tile, const Params& p, const Rows& rows) {
    constexpr int CHUNKS_OF_HEAD = round_up(HEAD_DIM, 16) / 8, CHUNKS = BLOCK_HEADS_KV * CHUNKS_OF_HEAD;
#pragma unroll 1
    for (int i = thread_id(); i < BLOCK_M * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, of_head = chunk % CHUNKS_OF_HEAD;
        const bool valid = rows.exists(row) && chunk / CHUNKS_OF_HEAD == row / HEAD_ROWS &&
                           (HEAD_DIM % 16 == 0 || of_head * 8 < HEAD_DIM);
        copy_async_16(tile.address(row, chunk), valid ? rows.pointer(p, row) + of_head * 8 : p.q, valid);
    }
}

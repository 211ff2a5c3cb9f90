// dQ from its sums: scaled and rounded. A block does 64 queries of a head.
constexpr int CONVERT_THREADS = 128;

extern "C" __global__ void __launch_bounds__(CONVERT_THREADS) backward_convert(const __grid_constant__ Params p) {
    Share share;
    if (!find_share<64, false>(p, p.heads_q, share)) return;
    constexpr int CHUNKS = HEAD_DIM / 8;
    const int rows = min_of(64, share.sequence.row_end - share.begin);
    const float* sums = p.dq_sums + dq_place(p, share, share.head, share.begin) * (64 * HEAD_DIM);
    Element* dq = p.dq + share.batch * p.dq_batch_stride + share.head * p.dq_head_stride + share.begin * p.dq_row_stride;
    for (int i = thread_id(); i < rows * CHUNKS; i += CONVERT_THREADS) {
        const int row = i / CHUNKS, chunk = i - row * CHUNKS;
        // Row r is in warp r / 16, in lanes 4 (r % 8) to 4 (r % 8) + 3, which have two columns each.
        const float* pair = sums + ((row / 16 * CHUNKS + chunk) * WARP_SIZE + row % 8 * 4) * 4 + row % 16 / 8 * 2;
        Chunk result;
#pragma unroll
        for (int n = 0; n < 4; ++n) result.word[n] = pack2<Element>(pair[n * 4] * p.scale, pair[n * 4 + 1] * p.scale);
        store_global_16(dq + row * p.dq_row_stride + chunk * 8, result);
    }
}

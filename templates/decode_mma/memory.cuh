// Tiles of decode_mma, and where they lie in a block's shared memory.
using QTile = SmemTile<BLOCK_M, BLOCK_HEADS_KV * HEAD_DIM>;
using KTile = SmemTile<BLOCK_N, K_COLUMNS>;
using VTile = SmemTile<BLOCK_N, V_COLUMNS>;

// Shared memory: Q unless it is in registers, then a ring for each warp; when all is read, the warps' partial results.
constexpr int Q_BYTES = Q_IN_REGISTERS ? 0 : QTile::BYTES;
constexpr int STAGE_BYTES = KTile::BYTES + VTile::BYTES;
constexpr int PITCH = HEAD_DIM_V + 8;  // floats of a row of O: 32 bytes more, so that 4 rows of C stand in different banks
constexpr int WARP_O_BYTES = BLOCK_M * PITCH * 4;
constexpr int STATISTICS_OFFSET = NUM_WARPS * WARP_O_BYTES, LAST_OFFSET = STATISTICS_OFFSET + NUM_WARPS * BLOCK_M * 8;
static_assert(SMEM_BYTES == larger(larger(Q_BYTES + NUM_WARPS * NUM_STAGES * STAGE_BYTES, LAST_OFFSET + 16),
                                   MAX_SPLITS * BLOCK_M * 8 + BLOCK_M * HEAD_DIM_V * 4), "shared memory request");
static_assert(BLOCK_M % 16 == 0 && BLOCK_N % 16 == 0 && HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "fragments and 16-byte chunks");
static_assert(BLOCK_HEADS_KV == 1 || (HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0), "a fragment is of one head");

// Shared memory: buffers of Q (later of the output), of K, of V, then barriers and tasks.
constexpr int ROWS_BYTES = larger(QTile::BYTES, OTile::BYTES);
constexpr int K_OFFSET = Q_STAGES * NUM_WARPGROUPS * ROWS_BYTES, V_OFFSET = K_OFFSET + NUM_STAGES * KTile::BYTES;
constexpr int BARRIERS_OFFSET = V_OFFSET + NUM_STAGES * VTile::BYTES;
constexpr int TASKS_OFFSET = BARRIERS_OFFSET + round_up(16 * (Q_STAGES + 2 * NUM_STAGES), 64);
static_assert(SMEM_BYTES == TASKS_OFFSET + 64 * Q_STAGES && sizeof(Task) == 64, "shared memory request");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256 && HEAD_DIM_V % 8 == 0 && HEAD_DIM_V <= 256, "shapes of wgmma");

DEVICE QTile q_tile(int stage, int group) { return {smem_base() + (stage * NUM_WARPGROUPS + group) * ROWS_BYTES}; }
DEVICE KTile k_tile(int stage) { return {smem_base() + K_OFFSET + stage * KTile::BYTES}; }
DEVICE VTile v_tile(int stage) { return {smem_base() + V_OFFSET + stage * VTile::BYTES}; }
DEVICE SharedArray<Task> task_at(int stage) { return {smem_base() + TASKS_OFFSET + stage * 64}; }
struct Rings {
    Ring q{smem_base() + BARRIERS_OFFSET}, k{q.full(Q_STAGES)}, v{k.full(NUM_STAGES)};
    DEVICE Rings() {}
};

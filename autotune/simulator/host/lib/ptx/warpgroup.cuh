// Twin of lib/ptx/warpgroup.cuh.

constexpr int WARPGROUP_SIZE = 4 * WARP_SIZE;

DEVICE int warpgroup_id(AT) { return shuffle(thread_id() / WARPGROUP_SIZE, 0, line); }  // on a GPU, too: all lanes take part

DEVICE void named_barrier_sync(int id, int threads, AT) { sim::barrier(id, threads, true, line); }
DEVICE void named_barrier_arrive(int id, int threads, AT) { sim::barrier(id, threads, false, line); }

template <int REGISTERS> DEVICE void registers_release(AT) { sim::set_registers(REGISTERS, line); }
template <int REGISTERS> DEVICE void registers_claim(AT) { sim::set_registers(REGISTERS, line); }

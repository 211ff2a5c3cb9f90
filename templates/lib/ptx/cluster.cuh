#include "lib/base.cuh"
#include "lib/ptx/split.cuh"

// Thread-block clusters (sm_90): blocks that run together on neighbouring SMs and read each other's shared memory.

// Waits for all threads of the cluster, each warp as one: what they did before, shared memory included, is visible after it. No
// block reads another one's shared memory before all have begun.
DEVICE void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The last that the threads of a cluster do: none ends before others have read its shared memory. What has been loaded is in use
// by then, and what was written need not be visible: waiting for that too takes 0.5 us.
DEVICE void leave_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The address, for load_remote_floats only, of the same place in block `rank` of the cluster.
DEVICE u32 remote_address(u32 smem_address, int rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address), "r"(rank));
    return address;
}
DEVICE Floats4 load_remote_floats(u32 address) {
    Floats4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x[0]), "=f"(v.x[1]), "=f"(v.x[2]), "=f"(v.x[3]) : "r"(address) : "memory");
    return v;
}
DEVICE void load_remote_floats(u32 address, float& first, float& second) {
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}

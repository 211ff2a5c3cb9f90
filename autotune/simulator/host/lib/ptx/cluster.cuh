// Twin of lib/ptx/cluster.cuh.

DEVICE void sync_cluster(AT) { sim::cluster_barrier(line); }
DEVICE void leave_cluster(AT) { sim::cluster_barrier(line); }
DEVICE u32 remote_address(u32 smem_address, int rank, AT) { return sim::remote_address(smem_address, rank, line); }
DEVICE Floats4 load_remote_floats(u32 address, AT) {
    Floats4 v;
    memcpy(v.x, sim::remote_read(address, 16, line), 16);
    return v;
}
DEVICE void load_remote_floats(u32 address, float& first, float& second, AT) {
    float two[2];
    memcpy(two, sim::remote_read(address, 8, line), 8);
    first = two[0], second = two[1];
}

// Twin of lib/ptx/mbarrier.cuh.

DEVICE void mbarrier_init(u32 barrier, int arrivals, AT) { sim::mbarrier_init(barrier, arrivals, line); }
DEVICE void mbarrier_init_fence(AT) { sim::mbarrier_init_fence(line); }
DEVICE void mbarrier_arrive(u32 barrier, AT) { sim::mbarrier_arrive(barrier, line); }
DEVICE void mbarrier_arrive_expect(u32 barrier, int bytes, AT) { sim::mbarrier_arrive_expect(barrier, bytes, line); }
DEVICE void mbarrier_wait(u32 barrier, u32 parity, AT) { sim::mbarrier_wait(barrier, parity, line); }

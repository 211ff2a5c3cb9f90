// Twin of templates/lib/ptx/ticket.cuh.

DEVICE u32 take_ticket(u32* counter, u32 last, AT) { return sim::atomic_inc(counter, last, line); }

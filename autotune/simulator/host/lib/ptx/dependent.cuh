// Twin of lib/ptx/dependent.cuh.

DEVICE void wait_for_dependencies(AT) { sim::wait_for_dependencies(line); }
DEVICE void wait_for_dependencies(const void*, const void*, int, AT) { sim::wait_for_dependencies(line); }
DEVICE void prefetch_l2(const void* global, int bytes, AT) { sim::prefetch(global, bytes, line); }
DEVICE int load_guess(const int* global, AT) { return sim::guess(global, line); }
DEVICE void launch_dependents() {}  // the next kernel begins when this one has ended

// Twin of lib/ptx/reduce.cuh.

DEVICE void add_global_floats(float* global, const float (&v)[4], AT) { sim::add_floats(global, v, 4, line); }

#include "lib/ptx/split.cuh"
#include "lib/ptx/dependent.cuh"

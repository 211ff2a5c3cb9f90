#include "attention/alibi.cuh"

// Which slopes a block needs, and the key at which row 0 would stand.
DEVICE int sequence_number(const Work& work) { return work.number; }
DEVICE int diagonal_of(const Params&, const Work& work) { return work.diagonal; }

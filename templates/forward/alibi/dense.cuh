#include "attention/alibi.cuh"

// Which slopes a block needs, and the key at which query 0 stands.
DEVICE int sequence_number(const Work& work) { return work.batch; }
DEVICE int diagonal_of(const Params& p, const Work&) { return p.seqlen_k - p.seqlen_q; }

#include "lib/base.cuh"

// The keys of one sequence.
struct Keys {
    int number;    // among the batch entries, or the packed sequences
    int key_begin, key_end;
    int diagonal;  // row i stands at key i + diagonal
};

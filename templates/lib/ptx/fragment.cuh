#include "lib/base.cuh"
#include "lib/ptx/math.cuh"

// Register tiles of the tensor cores: which lane holds what.
//
// Layouts (PTX ISA, "Matrix Fragments for mma.m16n8k16"). With row = lane / 4 and pair = 2 * (lane % 4):
//   A (16 x 16): a[0] = (row, pair..), a[1] = (row + 8, pair..), a[2] = (row, pair + 8..), a[3] = (row + 8, pair + 8..)
//   B (16 x 8):  b[0] = (k = pair.., n = row), b[1] = (k = pair + 8.., n = row)
//   C (16 x 8):  c[0], c[1] = (row, pair..), c[2], c[3] = (row + 8, pair..)
// Two neighbouring C tiles therefore hold what one A tile needs: S feeds P V without leaving registers.

// Where this lane's elements of a C tile stand: rows c_row() and c_row() + 8, columns c_column() and c_column() + 1.
DEVICE int c_row() { return lane_id() / 4; }
DEVICE int c_column() { return lane_id() % 4 * 2; }

// Reduce over the 4 lanes that share a row of C.
DEVICE float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// Two neighbouring 16 x 8 tiles of C, rounded, as the 16 x 16 tile of A with the same rows and columns.
template <typename Element>
DEVICE void c_to_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack2<Element>(left[0], left[1]);
    a[1] = pack2<Element>(left[2], left[3]);
    a[2] = pack2<Element>(right[0], right[1]);
    a[3] = pack2<Element>(right[2], right[3]);
}

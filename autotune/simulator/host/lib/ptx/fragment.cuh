// Twin of lib/ptx/fragment.cuh.

DEVICE int c_row() { return lane_id() / 4; }
DEVICE int c_column() { return lane_id() % 4 * 2; }

DEVICE float row_max(float x, AT) {
    x = fmaxf(x, shuffle_xor(x, 1, line));
    return fmaxf(x, shuffle_xor(x, 2, line));
}
DEVICE float row_sum(float x, AT) {
    x += shuffle_xor(x, 1, line);
    return x + shuffle_xor(x, 2, line);
}

template <typename Element>
DEVICE void c_to_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack2<Element>(left[0], left[1]);
    a[1] = pack2<Element>(left[2], left[3]);
    a[2] = pack2<Element>(right[0], right[1]);
    a[3] = pack2<Element>(right[2], right[3]);
}

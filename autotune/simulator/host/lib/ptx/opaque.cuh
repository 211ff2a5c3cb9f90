// Twin of lib/ptx/opaque.cuh.

DEVICE int opaque(int x) { return x; }

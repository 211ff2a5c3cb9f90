"""The kernels of the backward."""

"""Kernels of forward attention."""

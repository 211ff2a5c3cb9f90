"""Kernels of a few queries over a long cache."""

"""autotune where people already call attention: torch ops, transformers, SDPA, serving engines.

Each module is thin, stands above `autotune.calls`, and imports its framework only when it is imported itself.
"""

"""Problems at which kernels elsewhere broke, which correctness checks always hold."""

# What broke elsewhere -> (problem, form of its arrays).
REPORTED: dict[str, tuple[str, str]] = {
    "rows without a key": ("forward-bf16-b1-h8x8-q2048-k1024-d128-causal", "packed"),
    "right window beyond the keys": ("forward-fp16-b1-h4x4-q512-k128-d64-right1073741824", "packed"),
    "right window as long as the queries": ("forward-fp16-b1-h4x4-q512-k128-d64-right511", "packed"),
    "right window as long as the keys": ("forward-fp16-b1-h4x4-q512-k128-d64-right128", "packed"),
    "a window of one key": ("forward-bf16-b1-h2x2-q300-k300-d64-causal-left0", "packed"),
    "bottom-right causal": ("forward-bf16-b1-h1x1-q2-k5-d64-causal", "packed"),
    "no key": ("forward-bf16-b1-h8x8-q64-k0-d128", "packed"),
    "no key, causal": ("forward-fp16-b2-h8x2-q64-k0-d64-causal", "packed"),
    "no key but a sink": ("forward-bf16-b1-h8x8-q64-k0-d64-causal-sinks", "packed"),
    "offsets beyond 32 bits": ("forward-bf16-b400-h4x4-q10496-k128-d128", "packed"),
    "more than 32768 keys, head dim 512": ("forward-bf16-b1-h1x1-q33728-k33728-d512", "packed"),
    "more than 160000 keys": ("forward-bf16-b1-h2x1-q128-k170000-d96", "packed"),
    "lse under grouped heads": ("forward-fp16-b1-h64x8-q256-k256-d128", "packed"),
    "7 heads share keys": ("forward-bf16-b2-h28x4-q256-k256-d128-causal", "packed"),
    "5 heads share keys": ("forward-bf16-b2-h40x8-q256-k256-d128-causal", "packed"),
    "K strided, V not": ("forward-bf16-b2-h16x16-q62-k62-d128-causal", "unlike"),
    "heads before rows, D 256": ("forward-bf16-b1-h32x32-q8192-k8192-d256", "heads_first"),
    "a tail of one row": ("forward-fp16-b2-h8x8-q1025-k1025-d64-causal", "packed"),
    "softcap, large logits": ("forward-bf16-b1-h8x4-q500-k500-d128-softcap50", "packed"),
    "softcap, then the mask": ("forward-bf16-b1-h8x4-q500-k600-d256-causal-left200-softcap15", "packed"),
    "causal as a window": ("forward-bf16-b2-h8x8-q1024-k1024-d128-causal", "packed"),
    "128 heads of 192 and 128": ("forward-bf16-b1-h128x128-q1024-k1024-d192x128-causal", "packed"),
    "D 256 in a batch": ("forward-bf16-b3-h16x2-q500-k500-d256-causal", "packed"),
    "D 96": ("forward-fp16-b1-h8x8-q2048-k8192-d96", "packed"),
    "odd length under a group": ("forward-bf16-b2-h12x4-q1023-k1023-d128-causal", "packed"),
    "alibi, more keys than queries": ("forward-bf16-b2-h8x8-q113-k203-d64-causal-alibi", "packed"),
    "alibi, not causal": ("forward-fp16-b2-h6x6-q203-k113-d128-alibi", "packed"),
    "packed, empty sequences": ("forward-bf16-b4-h4x1-q2048-k5120-d256-causal-varlen", "packed"),
    "packed, two long sequences": ("forward-bf16-b3-h32x32-q1023-k2044-d128-causal-varlen", "packed"),
    "packed, few keys": ("forward-fp16-b3-h1x1-q146-k3-d32-causal-varlen", "packed"),
}


# The same of gradients: the shapes of the bugs that docs/log.md lists under "backward".
REPORTED_BACKWARD: dict[str, tuple[str, str]] = {
    "windows about a tile of keys": ("backward-bf16-b1-h2x2-q384-k384-d128-left63-right0", "packed"),
    "a window of one key, more keys": ("backward-bf16-b1-h2x1-q200-k330-d64-causal-left0", "packed"),
    "a window of five tiles, fewer keys": ("backward-fp16-b1-h2x1-q900-k700-d64-left640-right1", "packed"),
    "window beside determinism": ("backward-bf16-b2-h4x4-q700-k700-d128-causal-left129-deterministic", "packed"),
    "a tail of one row": ("backward-fp16-b2-h8x8-q1025-k1025-d64-causal", "packed"),
    "packed tails": ("backward-bf16-b5-h4x2-q65-k65-d128-causal-varlen", "packed"),
    "queries without keys": ("backward-bf16-b1-h4x4-q513-k100-d128-causal-sinks", "packed"),
    "queries without keys or sinks": ("backward-fp16-b2-h4x2-q300-k20-d64-causal", "packed"),
    "keys without queries": ("backward-bf16-b1-h4x1-q40-k900-d128-right0-left10", "packed"),
    "packed, empty sequences": ("backward-bf16-b4-h4x1-q2048-k5120-d256-causal-varlen", "packed"),
    "D 256, batch, groups": ("backward-bf16-b3-h16x2-q500-k500-d256-causal", "packed"),
    "D 256, packed, groups": ("backward-bf16-b3-h8x1-q400-k400-d256-causal-varlen", "packed"),
    "3 heads share keys": ("backward-bf16-b2-h12x4-q1023-k1023-d128-causal", "packed"),
    "8 heads share keys": ("backward-fp16-b2-h64x8-q256-k256-d128", "packed"),
    "strides beyond 32 bits": ("backward-bf16-b400-h4x4-q10496-k128-d128", "packed"),
    "heads before rows": ("backward-bf16-b2-h8x8-q300-k300-d128-causal", "heads_first"),
    "one gradient for all": ("backward-bf16-b2-h4x4-q130-k130-d64", "shared"),
    "192 and 128": ("backward-bf16-b1-h8x8-q1024-k1024-d192x128-causal", "packed"),
    "softcap, large logits": ("backward-bf16-b1-h8x4-q500-k500-d128-softcap50", "packed"),
    "sinks, softcap and alibi": ("backward-fp16-b2-h8x2-q300-k350-d64-causal-left70-softcap20-alibi-sinks", "packed"),
}


def reported(op: str) -> dict[str, tuple[str, str]]:
    """What broke -> (problem, form of its arrays), of forward or backward kernels."""
    return REPORTED_BACKWARD if op == "backward" else REPORTED

"""What a GPU's limits have to say of a request: the sentences that rules of several kernels share."""

from __future__ import annotations

from ..core.gpu import Gpu

MAX_REGISTERS = 255  # of a thread, on every arch


def resident_blocks(gpu: Gpu, threads: int, registers: int, smem_bytes: int) -> int:
    """Blocks of `threads` threads that an SM holds at once, at least 1; `registers` are of a thread."""
    return max(1, min(gpu["registers_per_sm"] // (threads * max(-(-registers // 8) * 8, 24)),
                      gpu["smem_per_sm_bytes"] // (smem_bytes + gpu["smem_reserved_bytes"]),
                      gpu["threads_per_sm"] // threads, gpu["blocks_per_sm"]))


def shared_memory_exceeded(smem_bytes: int, gpu: Gpu, blocks_per_sm: int = 1) -> str | None:
    """Why `blocks_per_sm` blocks of `smem_bytes` dynamic shared memory cannot be resident on an SM at once, or None."""
    if smem_bytes > gpu["smem_per_block_bytes"]:
        return f"it requests {smem_bytes} bytes of shared memory; a block of {gpu.name} can have {gpu['smem_per_block_bytes']}"
    if blocks_per_sm * (smem_bytes + gpu["smem_reserved_bytes"]) > gpu["smem_per_sm_bytes"]:
        return (f"{blocks_per_sm} blocks of {smem_bytes} bytes exceed the {gpu['smem_per_sm_bytes']} bytes of shared memory "
                "of an SM")
    return None


def threads_exceeded(threads: int, gpu: Gpu, blocks_per_sm: int) -> str | None:
    """Why `blocks_per_sm` blocks of `threads` cannot be resident on an SM at once, or None."""
    if blocks_per_sm * threads > gpu["threads_per_sm"]:
        return f"{blocks_per_sm} blocks of {threads} threads exceed the {gpu['threads_per_sm']} of an SM"
    return None


def registers_exceeded(need: int, available: int) -> str | None:
    """Why a thread that needs about `need` registers at once cannot have them, or None."""
    available = min(MAX_REGISTERS, available)
    return f"about {need} registers a thread are live at once; {available} are available" if need > available else None


def block_exceeded(threads: int, need: int, gpu: Gpu, blocks_per_sm: int) -> str | None:
    """Why `blocks_per_sm` blocks of `threads` that need about `need` registers each cannot be resident on an SM, or None."""
    return threads_exceeded(threads, gpu, blocks_per_sm) or \
        registers_exceeded(need, registers_available(threads, gpu, blocks_per_sm))


def registers_available(threads: int, gpu: Gpu, blocks_per_sm: int = 1) -> int:
    """Registers a thread if `blocks_per_sm` blocks of `threads` share an SM; they are handed out by eights."""
    return gpu["registers_per_sm"] // (threads * blocks_per_sm) // 8 * 8

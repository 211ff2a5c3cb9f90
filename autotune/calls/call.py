"""One call of attention, as launches take it: `Call`. All public calls, `verify`, timing and the simulator fill one.

A kernel's Params are made of its fields by name (`kernels.base.Field`); a plan is found by its `key`.
"""

from __future__ import annotations

from functools import lru_cache

from ..core.masks import CAUSAL, FULL
from ..core.problem import Problem
from ..core.sequences import bucket_batch, bucket_length

# What a problem has under the same name, besides what its mask hides.
SHAPE = ("op", "kv", "dtype", "kv_dtype", "heads_q", "heads_kv", "head_dim", "head_dim_v", "page_size", "deterministic", "batch")


@lru_cache(1 << 16)
def bucket(batch: int, longest_q: int, longest_k: int) -> tuple[int, int, int]:
    """What stands for these sizes where a config is chosen."""
    return bucket_batch(batch), bucket_length(longest_q), bucket_length(longest_k)


class Call:
    """What one call is about, and where its arrays are. Which fields must be set depends on the kernel: one that it reads and
    that is not set raises AttributeError with its name.

    Addresses are device addresses, 0 for none; strides are in elements. Of packed sequences `seqlen_q` and `seqlen_k` are those
    of all together, batch strides are 0, and the starts say where each begins; in a cache of pages `seqlen_k` is how many keys a
    sequence can have, and batch strides of k and v are those of pages.
    """

    __slots__ = (
        # who calls: adapter of the arrays' library, an array of the device, device index, cudaStream_t
        "library", "like", "device", "stream",
        # what decides the config, besides what follows: `longest_q` and `longest_k` are lengths of a sequence, about
        *SHAPE, "bounds", "softcap", "longest_q", "longest_k", "config",
        # sizes and numbers
        "seqlen_q", "seqlen_k", "scale", "sink_dtype", "k_scale", "v_scale", "k_scale_stride", "v_scale_stride",
        "pages", "min_queries", "uniform", "num_splits", "pieces",
        # addresses
        "q", "k", "v", "out", "lse", "sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "page_table",
        "k_scales", "v_scales", "dout", "dq", "dk", "dv", "dlse", "dsinks",
        # strides
        *(f"{tensor}_{axis}_stride" for tensor in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
          for axis in ("batch", "row", "head")),
        "alibi_batch_stride", "lse_batch_stride", "lse_head_stride", "page_table_stride",
        # what a launch needs, set by `Plan.run` and `Kernel.bind`, and the addresses of what it is lent; `plan`: what ran it, if
        # that was one; `params`: its own, if it is repeated; `lender`: the stream (its `stream_id`) that alone lent it all
        "plan", "params", "grids", "lender", "lent", "counters", "cluster",
        "workspace", "partial_o", "partial_statistics", "stats", "sink_sums", "dq_sums", "tickets",
        "keep", "keep_tickets",  # arrays that must live until the launch has been enqueued
    )

    def key(self) -> tuple:
        """What names the bucket of problems, device and config that this call belongs to."""
        bounds = self.bounds
        return (self.op, self.kv, self.device, self.dtype, self.kv_dtype, self.heads_q, self.heads_kv, self.head_dim,
                self.head_dim_v, bounds if bounds is CAUSAL or bounds is FULL else bounds.bucketed(), self.softcap,
                self.alibi_slopes != 0, self.sinks != 0, self.page_size, self.deterministic, self.config,
                bucket(self.batch, self.longest_q, self.longest_k))

    def set_strides(self, tensor: str, batch: int, row: int, head: int) -> None:
        """Sets those of one tensor."""
        for axis, stride in (("batch", batch), ("row", row), ("head", head)):
            setattr(self, f"{tensor}_{axis}_stride", stride)

    def twin(self, queries: int, config) -> tuple[Call, tuple]:
        """(a second call on the same arrays, for a forward kernel that takes sequences of up to so many queries; its key). To it
        a cache without pages has one page for each sequence."""
        other = Call()
        for name in _SHARED:
            setattr(other, name, getattr(self, name))
        other.op, other.kv, other.page_size = "forward", "paged", self.page_size or self.seqlen_k
        other.longest_q, other.config = queries, config
        return other, other.key()

    def problem(self) -> Problem:
        """What to compute, for whoever chooses a config. Raises `ProblemError`."""
        return Problem(**{name: getattr(self, name) for name in SHAPE}, **self.bounds._asdict(), softcap=self.softcap,
                       alibi=self.alibi_slopes != 0, sinks=self.sinks != 0, seqlen_q=self.longest_q,
                       seqlen_k=self.longest_k).simplified()

    @staticmethod
    def of(problem: Problem, device: int, config=None) -> Call:
        """A call of `problem` without arrays, for its `key`."""
        call = Call()
        for name in (*SHAPE, "bounds"):
            setattr(call, name, getattr(problem, name))
        call.device, call.config, call.softcap = device, config, float(problem.softcap)
        call.alibi_slopes, call.sinks = int(problem.alibi), int(problem.sinks)
        call.longest_q, call.longest_k = problem.seqlen_q, problem.seqlen_k
        return call


_SHARED = (*SHAPE, "library", "device", "bounds", "softcap", "longest_k", "seqlen_k", "sink_dtype", "sinks", "alibi_slopes",
           "alibi_batch_stride", "cu_seqlens_q", "cache_seqlens", "page_table", "page_table_stride")

"""Twelve bugs of other libraries' backwards, each as a test that would have found it here. Head dims are small."""

from itertools import product

import numpy as np
import pytest

from autotune import simulator
from autotune.calls.gradients import _unreadable
from autotune.check.gradients import make_gradient_inputs
from autotune.core.gpu import by_name, catalogue
from autotune.core.problem import Problem
from autotune.kernels import KERNELS, candidates

pytestmark = pytest.mark.slow

H200 = by_name("nvidia-h200")
BACKWARD = [kernel for kernel in KERNELS.values() if kernel.op == "backward"]
OWNERS = [KERNELS["backward_wgmma"], KERNELS["backward_mma"]]  # blocks own what they write


def problem(text: str) -> Problem:
    return Problem.parse(f"backward-{text}").simplified()


def right(text: str, kernel=KERNELS["backward_wgmma"], kinds=("mixed",)) -> None:
    asked = problem(text)
    verdict = simulator.verify(asked, kernel.default(asked, H200), kinds=kinds)
    assert verdict.ok, (text, verdict.message)


def test_1_no_step_starts_before_the_kernel_that_writes_its_inputs_has_ended():
    """A preprocess read dO before the previous kernel had written it: dQ and dK were wrong once in 3000 steps."""
    asked = problem("bf16-b2-h4x2-q300-k300-d128-causal-sinks")
    for kernel in BACKWARD:
        assert not any(step.dependent for step in kernel.plan(asked, kernel.default(asked, H200)))


def test_2_the_same_bits_on_workspaces_of_an_earlier_call():
    """Semaphores that were not zeroed, or raised too early, let blocks add in another order."""
    asked = problem("bf16-b2-h2x1-q130-k130-d16-causal-sinks-deterministic")
    given = make_gradient_inputs(asked, "mixed", 1)
    for kernel in OWNERS:
        seen = set()
        for seed in range(3):  # orders of blocks and warps; workspaces begin poisoned
            gradients = given.empty_gradients()
            assert simulator.simulate(asked, kernel.default(asked, H200), given, gradients, None, seed).ok
            seen.add(b"".join(np.ascontiguousarray(array).tobytes() for array in gradients))
        assert len(seen) == 1, kernel.name


def test_3_windows_about_a_block_of_keys():
    """Loops over queries that a window did not bound: deadlocks, 6 to 75 times the time, the largest block of keys wrong."""
    for (left, side), (queries, keys) in product(((0, 0), (1, 0), (127, 1), (128, 0), (129, 5)), ((200, 330), (330, 200))):
        right(f"bf16-b1-h1x1-q{queries}-k{keys}-d16-left{left}-right{side}")


@pytest.mark.parametrize("length", [1, 63, 65, 129])
def test_4_lengths_about_a_tile_read_no_statistics_that_nobody_wrote(length):
    """A preprocess padded rows to its own tile, the main kernel read past it: NaN where memory was dirty."""
    right(f"bf16-b2-h2x1-q{length}-k{length}-d16-causal")


def test_5_rows_without_a_key():
    """A log-sum-exp of -inf gave NaN."""
    for sinks in ("", "-sinks"):
        right(f"bf16-b1-h2x1-q200-k70-d16-causal{sinks}", kinds=("mixed", "masked_nan"))


def test_6_blocks_of_keys_that_no_query_sees_and_empty_sequences():
    """They hung, or left dK and dV as they were."""
    right("bf16-b1-h2x1-q30-k400-d16-left20-right0")
    right("bf16-b4-h2x1-q90-k200-d16-causal-varlen", kinds=("mixed", "random"))
    asked = problem("bf16-b1-h1x1-q0-k20-d64")
    assert [kernel.name for kernel in candidates(asked, H200)] == ["backward_mma"]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_7_any_group_of_heads_in_a_batch(group):
    """Grouped heads, packed or D 256 in a batch, met memory of others."""
    right(f"bf16-b2-h{group}x1-q70-k70-d16-causal")


def test_8_sizes_beyond_32_bits():
    """Strides of dO, and the size of dQ's sums, overflowed."""
    large = problem("bf16-b1-h64x64-q1048576-k1048576-d128-causal")
    for kernel in BACKWARD:
        config = kernel.default(large, H200)
        types = {field.name: field.type for field in kernel.params(large.static, config)}
        assert {types[name] for name in types if name.endswith("_stride")} == {"long long"}
        assert kernel.workspace_bytes(large, config) >= 2 * 4 * 64 * 1048576
    fused = KERNELS["backward_fused"]
    assert fused.workspace_bytes(large, fused.default(large, H200)) > 2**34


def test_9_dS_in_shared_memory_is_not_read_while_it_is_written():
    """Seen once in 50 runs at -O2. A fused kernel without the barrier on which its groups meet is found out."""
    fused = KERNELS["backward_fused"]
    asked = problem("bf16-b1-h1x1-q200-k128-d64")
    config, given = fused.default(asked, H200), make_gradient_inputs(asked, "random", 0)
    source, line = simulator.host_source(asked, config), "named_barrier_sync(FILLED + buffer(), THREADS);"
    assert source.count(line) == 1
    mutant = source.replace(line, "named_barrier_arrive(FILLED + buffer(), THREADS);")
    found = [simulator.simulate(asked, config, given, given.empty_gradients(), None, seed, source=mutant) for seed in range(3)]
    assert any(not simulation.ok for simulation in found)


def test_10_expanded_gradients_are_copied_where_the_copy_engine_reads():
    """dO of out.sum() has strides of 0, and was read as if it were contiguous."""
    assert _unreadable(16, (2, 100, 4, 64), (0, 0, 0, 0), True) and _unreadable(16, (2, 100, 4, 64), (0, 0, 0, 0), False)
    rows = (16, (2, 100, 4, 64), (25600, 0, 64, 1))
    assert _unreadable(*rows, True) and not _unreadable(*rows, False)
    assert not _unreadable(16, (1, 100, 4, 64), (0, 256, 64, 1), True)


def test_11_shared_memory_of_all_pairs_of_head_dims():
    """A launch asked for more than an SM has where head dims of keys and values differ."""
    for gpu in catalogue().values():
        for head_dim, head_dim_v in product(range(16, 257, 48), range(16, 257, 24)):
            asked = problem(f"bf16-b1-h2x2-q500-k500-d{head_dim}x{head_dim_v}-causal")
            for kernel in candidates(asked, gpu):
                steps = kernel.plan(asked, kernel.default(asked, gpu))
                assert max(step.smem_bytes for step in steps) <= gpu["smem_per_block_bytes"], (asked, gpu.name)


def test_12_sinks_have_the_gradient_of_the_lse_and_softcap_is_its_own_kernel():
    """The sinks' gradient lacked dlse; one with a soft cap was taken from the cache for one without."""
    assert make_gradient_inputs(problem("bf16-b1-h2x1-q20-k20-d16-sinks"), "mixed", 0).dlse is not None
    for softcap in ("-softcap5", ""):
        right(f"bf16-b1-h2x1-q100-k120-d16-causal{softcap}-sinks", kinds=("mixed", "large"))


def test_a_number_of_the_warp_is_asked_for_by_all_its_lanes():
    """`backward_rows` asked for it in a branch of one lane: an H200 waited for the others for good, the simulator did not."""
    asked = problem("bf16-b1-h2x1-q70-k70-d16-causal-sinks")
    config = OWNERS[0].default(asked, H200)
    source = simulator.host_source(asked, config)
    planted = source.replace("if (lane_id() == 0) sums.set(warp, ", "if (lane_id() == 0) sums.set(warp_id(), ")
    assert planted != source
    verdict = simulator.verify(asked, config, kinds=("mixed",), source=planted)
    assert not verdict.ok and "lane" in verdict.message, verdict.message


def test_weights_that_fp16_loses_take_their_gradient_along():
    """Two keys at the end of a window are seen by one row each, with weights below 2^-25: dS, which is made from rounded weights,
    is 0, and what of dP stands beyond D is lost with it. The allowed error once knew of dP only."""
    right("fp16-b1-h16x1-q3-k1024-d256-causal-left127-alibi-varlen-deterministic", kinds=("large",))

"""GPUs: boards of one chip are told apart, and records of what a GPU is travel (C10, C12, F23, F28)."""

import copy
import pickle

import pytest

from autotune.core.gpu import GpuError, by_name, catalogue, detect, from_properties, resolve
from autotune.core.problem import Problem, ProblemError
from autotune.database.lookup import lookup


def properties(gpu, **changes) -> dict:
    """What a driver says of a board of the catalogue."""
    return {"name": gpu.title.encode(), "major": gpu.arch // 10, "minor": gpu.arch % 10, "multiProcessorCount": gpu.sms,
            "l2CacheSize": gpu["l2_bytes"], "totalGlobalMem": gpu["memory_bytes"],
            "memoryClockRate": gpu["memory_clock_mhz"] * 1000,
            "clockRate": gpu["sm_clock_mhz"] * 1000, "sharedMemPerBlockOptin": gpu["smem_per_block_bytes"],
            "sharedMemPerMultiprocessor": gpu["smem_per_sm_bytes"], "regsPerMultiprocessor": gpu["registers_per_sm"],
            "maxThreadsPerMultiProcessor": gpu["threads_per_sm"], **changes}


@pytest.mark.parametrize("name", catalogue())
def test_a_board_of_the_catalogue_is_known(name):
    for hidden in ((), ("clockRate",), ("clockRate", "memoryClockRate")):
        there = properties(by_name(name), **dict.fromkeys(hidden, 0))
        assert from_properties(there).name == name and from_properties(there).identity == by_name(name).identity


@pytest.mark.parametrize("like, changes, bandwidth", [
    ("nvidia-l40s", dict(name=b"NVIDIA RTX 6000 Ada Generation", memoryClockRate=10_001_000, clockRate=2_505_000,
                         memoryBusWidth=384), 960),
    ("nvidia-l40s", dict(name=b"RTX 6000 Ada", memoryClockRate=10_001_000), 960),
    ("nvidia-l40s", dict(name=b"NVIDIA L40", clockRate=2_490_000, memoryBusWidth=384), 864),
    ("nvidia-a100-sxm-80gb", dict(name=b"NVIDIA A100 80GB PCIe", memoryClockRate=1_512_000, memoryBusWidth=5120), 1935),
    ("nvidia-h200", dict(memoryClockRate=2_619_000, memoryBusWidth=6144), 4023)])
def test_c12_boards_of_one_chip_are_told_apart(like, changes, bandwidth):
    gpu = from_properties(properties(by_name(like), **changes))
    assert gpu.name not in catalogue() and abs(gpu["bandwidth_gb_s"] - bandwidth) <= 1
    assert gpu["memory_clock_mhz"] == changes.get("memoryClockRate", by_name(like)["memory_clock_mhz"] * 1000) // 1000


def test_c10_f23_gpus_and_matches_pickle_and_copy():
    match = lookup(Problem.parse("forward-bf16-b1-h32x8-q8192-k8192-d128-causal"), "nvidia-h200")
    for thing in (by_name("nvidia-h200"), match):
        assert pickle.loads(pickle.dumps(thing)) == thing == copy.deepcopy(thing)
    assert pickle.loads(pickle.dumps(match)).gpu.limits == match.gpu.limits


@pytest.mark.parametrize("changes", [dict(alibi="yes"), dict(sinks=[]), dict(sinks=1), dict(packed_queries=None),
                                     dict(kv_dtype=[1]), dict(dtype={}), dict(op=None), dict(kv=["dense"])], ids=str)
def test_f28_fields_of_the_wrong_kind_are_refused(changes):
    with pytest.raises(ProblemError, match=next(iter(changes))):
        Problem(**changes)


@pytest.mark.parametrize("gpu", [10**30, [1], "\x1b[2J", 1.5, "x" * 10**6])
def test_f28_a_gpu_that_is_none_is_one_sentence(gpu):
    with pytest.raises(GpuError) as caught:
        resolve(gpu) if not isinstance(gpu, int) else detect(gpu)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2000

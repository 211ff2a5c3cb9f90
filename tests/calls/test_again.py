"""Calls that are launched as an earlier one was: with the Params that looking at each would give, and only if they may."""

import threading
import weakref

import numpy as np
import pytest
from fake_arrays import Tensor, aligned, fake_gpu, qkv, random  # noqa: F401 (a fixture)

import autotune
from autotune.calls import again, autograd, dense, kvcache, plans
from autotune.device import counters
from autotune.device.arrays import AttentionError
from autotune.device.launch import LaunchError


def integers(*numbers):
    return Tensor(np.array(numbers, np.int32))


def decode(seed=0, keys=300, **options):
    q, k, v = random((2, 1, 4, 64), seed=seed), *(random((2, keys, 2, 64), seed=seed + n) for n in (1, 2))
    return (q, k, v), {"cache_seqlens": integers(100 + seed, 300), **options}


def paged(seed=0, rows=2):
    q, k, v = random((2, rows, 4, 64), seed=seed), *(random((40, 16, 2, 64), seed=seed + n) for n in (1, 2))
    table = Tensor(np.random.default_rng(seed).permutation(40).astype(np.int32).reshape(2, 20))
    return (q, k, v), {"cache_seqlens": integers(100 + seed, 300), "page_table": table, "max_seqlen_k": 300, "scale": 0.2}


def packed(seed=0):
    (_, k, v), options = paged(seed)
    return (random((5, 4, 64), seed=seed), k, v), {**options, "cu_seqlens_q": integers(0, 2 + seed % 2, 5), "max_seqlen_q": 3}


def full(seed=0):
    return decode(seed)[0], {"causal": False, "softcap": 20.0}


def launched(gpu, arrays, options):
    """(the result, Params) of a call."""
    result = autotune.attention_with_kvcache(*arrays, **options)
    return result.array.astype(np.float32), gpu.calls[-1]


class Everything(set):
    """Hashes of forms that have all been seen before."""

    def __contains__(self, _):
        return True


@pytest.fixture(autouse=True)
def computed(gpu, monkeypatch):
    gpu.compute = "bf16", 64, 64
    monkeypatch.setattr(again, "_seen", Everything())


@pytest.mark.parametrize("given", [False, True], ids=["", "into out"])
@pytest.mark.parametrize("make", [decode, paged, packed, full], ids=lambda make: make.__name__)
def test_a_call_like_an_earlier_one_gets_the_same_params(gpu, make, given, monkeypatch):
    looked, understand = [], kvcache.understand
    monkeypatch.setattr(kvcache, "understand", lambda *arguments: looked.append(1) or understand(*arguments))
    for seed in range(4):
        arrays, options = make(seed)
        out = {"out": Tensor(aligned(arrays[0].shape, arrays[0].dtype))} if given else {}
        result, params = launched(gpu, arrays, {**options, **out})
        assert len(looked) == 1
        kept = dict(plans.repeatable)
        plans.repeatable.clear()
        expected, fresh = launched(gpu, arrays, {**options, **out})
        assert looked.pop() and (result == expected).all()
        assert {**params, "out": 0} == {**fresh, "out": 0} and (not given or params["out"] == fresh["out"])
        plans.repeatable.update(kept)
    assert len(gpu.calls) == 8


@pytest.mark.parametrize("keywords", [{}, {"causal": True, "scale": 0.3}, {"softcap": 9.0}], ids=str)
@pytest.mark.parametrize("rows", [5, 200])
def test_so_does_attention(gpu, rows, keywords, monkeypatch):
    """Its tensor maps, too, are those of each call's arrays."""
    looked = []
    monkeypatch.setattr(dense, "Call", lambda make=dense.Call: looked.append(1) or make())
    for seed in range(3):
        q, k, v = (random((2, n, heads, 64), seed=seed + heads) for n, heads in ((rows, 4), (rows + 9, 2), (rows + 9, 2)))
        for out in (None, Tensor(aligned(q.shape, q.dtype))):
            before = len(looked)
            result = autotune.attention(q, k, v, out=out, **keywords).array.astype(np.float32)
            params = gpu.calls[-1]
            assert len(looked) - before == (seed == 0)
            kept = dict(plans.repeatable)
            plans.repeatable.clear()
            expected = autotune.attention(q, k, v, out=out, **keywords).array.astype(np.float32)
            assert len(looked) - before == 1 + (seed == 0) and (result == expected).all()
            same = {name for name in params if params[name] == gpu.calls[-1][name]}
            assert set(params) - same <= (set() if out else {"out", "out_map"})
            plans.repeatable.update(kept)


def test_attention_looks_at_what_it_must(gpu, monkeypatch):
    q, k, v = qkv(seqlen_q=5, seqlen_k=7)
    expected = autotune.attention(q, k, v).array.astype(np.float32)
    forms = len(plans.repeatable)
    for causal, arrays in ((True, (q, k, v)), (False, (q, Tensor(k.array[:, ::-1]), v))):  # of strides that no map can have
        first, second = (autotune.attention(*arrays, causal=causal).array.astype(np.float32) for _ in range(2))
        assert (first == second).all() and (first != expected).any()
    assert forms == 1 and len(plans.repeatable) == 2
    _, kept = autotune.attention(q, k, v, return_lse=True), len(plans.repeatable)
    assert kept == 2
    k.requires_grad = True
    monkeypatch.setattr(autograd, "attend", lambda *_, **options: "recorded")
    assert autotune.attention(q, k, v) == "recorded"


def test_sizes_that_come_once_are_not_kept(gpu, monkeypatch):
    monkeypatch.setattr(again, "_seen", set())
    monkeypatch.setattr(again, "MAX_FORMS", 6)
    for keys in range(300, 310):
        arrays, options = decode(keys=keys)
        autotune.attention_with_kvcache(*arrays, **options)
        assert not plans.repeatable and len(again._seen) <= 6
    autotune.attention_with_kvcache(*arrays, **options)
    assert len(plans.repeatable) == 1


def sliced(keys):
    (q, k, v), options = decode()
    return (q, k[:, :keys], v[:, :keys]), options


OTHERS = {
    "keys": lambda: decode(keys=310), "strides": lambda: sliced(150), "no lengths": lambda: (decode()[0], {}),
    "a scale": lambda: decode(scale=0.3), "a cap": lambda: decode(softcap=5.0), "no mask": lambda: decode(causal=False),
    "a guess": lambda: decode(max_seqlen_k=200), "parts": lambda: decode(num_splits=2), "a window": lambda: decode(window=(9, 0)),
    "sinks": lambda: decode(sinks=random((4,))), "lse": lambda: decode(return_lse=True),
    "a place": lambda: decode(out=Tensor(aligned((2, 1, 4, 64), decode()[0][0].dtype)))}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_is_looked_at(gpu, name, monkeypatch):
    arrays, options = decode()
    autotune.attention_with_kvcache(*arrays, **options)
    looked, understand = [], kvcache.understand
    monkeypatch.setattr(kvcache, "understand", lambda *arguments: looked.append(1) or understand(*arguments))
    arrays, options = OTHERS[name]()
    autotune.attention_with_kvcache(*arrays, **options)
    assert looked


def misaligned():
    (q, k, v), options = decode()
    raw = aligned((q.array.size + 1,), q.dtype)
    raw[1:] = q.array.ravel()
    return (Tensor(raw[1:].reshape(q.shape)), k, v), options


def gaps():
    arrays, options = decode()
    return arrays, {**options, "cache_seqlens": Tensor(np.array([100, 0, 300, 0], np.int32)[::2])}


@pytest.mark.parametrize("make", [misaligned, gaps], ids=lambda make: make.__name__)
def test_what_is_copied_is_copied_each_time(gpu, make):
    arrays, options = decode()
    expected, _ = launched(gpu, arrays, options)
    for turn in range(2):
        result, _ = launched(gpu, *make())
        assert gpu.library.copies == turn + 1 and (result == expected).all()


def wanting(name):
    (q, k, v), options = decode()
    arrays = {"q": q, "k_cache": k, "v_cache": v}
    if name == "out":
        options["out"] = arrays["out"] = Tensor(aligned(q.shape, q.dtype))
        autotune.attention_with_kvcache(q, k, v, **options)
    arrays[name].requires_grad = True
    return (q, k, v), options


REFUSED = {
    "q requires grad": lambda: wanting("q"), "k_cache requires grad": lambda: wanting("k_cache"),
    "v_cache requires grad": lambda: wanting("v_cache"), "out requires grad": lambda: wanting("out"),
    "max_seqlen_k is 300.0": lambda: decode(max_seqlen_k=300.0), "max_seqlen_q must be None": lambda: decode(max_seqlen_q=1),
    "cache_seqlens is int64": lambda: decode(cache_seqlens=Tensor(np.array([1, 2]))),
    "cache_seqlens is a ndarray": lambda: decode(cache_seqlens=np.array([1, 2], np.int32)),
    "k_cache is a list": lambda: ((decode()[0][0], [1], [2]), {}), "num_splits is True": lambda: decode(num_splits=True)}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_refused_after_calls_that_were_served(gpu, words):
    for guess in (None, 300):
        arrays, options = decode(max_seqlen_k=guess)
        for _ in range(2):
            autotune.attention_with_kvcache(*arrays, **options)
    arrays, options = REFUSED[words]()
    with pytest.raises(AttentionError, match=words):
        autotune.attention_with_kvcache(*arrays, **options)


def test_threads_do_not_share_a_call(gpu):
    arrays, options = decode()
    expected, _ = launched(gpu, arrays, options)
    found = []

    def repeat():
        for _ in range(5):
            found.append(autotune.attention_with_kvcache(*arrays, **options).array.astype(np.float32))

    threads = [threading.Thread(target=repeat) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (waiting,) = plans.repeatable.values()
    assert len(found) == 30 and all((result == expected).all() for result in found) and 1 <= len(waiting) <= 7


def test_no_array_is_kept(gpu):
    for _ in range(2):
        arrays, options = decode()
        options["out"] = Tensor(aligned(arrays[0].shape, arrays[0].dtype))
        autotune.attention_with_kvcache(*arrays, **options)
        refs = [weakref.ref(array) for array in (*arrays, *options.values())]
        del arrays, options
        assert plans.repeatable and not any(ref() for ref in refs)


def test_a_launch_that_fails_leaves_the_next_one_whole(gpu):
    arrays, options = decode()
    expected, _ = launched(gpu, arrays, options)
    gpu.fail = "launch"
    with pytest.raises(LaunchError, match="OUT_OF_RESOURCES"):
        autotune.attention_with_kvcache(*arrays, **options)
    gpu.fail = None
    assert (launched(gpu, arrays, options)[0] == expected).all()


def test_a_captured_call_is_lent_what_is_its_own(gpu):
    arrays, options = decode(keys=3000, max_seqlen_k=3000)
    for _ in range(2):
        _, before = launched(gpu, arrays, options)
    gpu.capturing = True
    captured = [launched(gpu, arrays, options)[1] for _ in range(2)]
    assert before["tickets"] and before["partial_o"] and len({p["tickets"] for p in (before, *captured)}) == 3
    assert [capturing for _, capturing in gpu.library.workspaces] == [True, True]


@pytest.mark.parametrize("named", [True, False])
def test_each_stream_lends_what_is_its_own(gpu, monkeypatch, named):
    if not named:
        monkeypatch.setattr(counters, "_id_of", lambda: None)
    arrays, options = decode(keys=3000, max_seqlen_k=3000)
    seen = []
    for stream in (70, 71, 71, 70, 70):
        gpu.library.streams[0] = stream
        _, params = launched(gpu, arrays, options)
        assert gpu.streams[-1] == stream and params["partial_o"] and params["tickets"]
        seen.append((params["tickets"], params["partial_o"]))
    assert bool(gpu.library.workspaces) != named
    if named:
        assert seen[0] == seen[3] == seen[4] and seen[1] == seen[2] and not set(seen[0]) & set(seen[1])
    else:
        assert len(gpu.library.workspaces) == 10  # a workspace and counters each time


def test_only_so_many_forms_are_kept_and_none_of_plans_that_went(gpu, monkeypatch):
    monkeypatch.setattr("autotune.calls.again.MAX_FORMS", 3)
    for keys in range(300, 310):
        arrays, options = decode(keys=keys)
        autotune.attention_with_kvcache(*arrays, **options)
        assert 1 <= len(plans.repeatable) <= 3
    monkeypatch.setattr(plans, "MAX_PLANS", len(plans._plans))
    autotune.attention_with_kvcache(*qkv(seqlen_q=1, seqlen_k=5000))
    assert len(plans.repeatable) == 1


def test_nothing_is_kept_where_no_decode_kernel_ran_alone(gpu):
    (q, k, v), options = decode()
    for queries, keys in ((0, 300), (1, 0), (17, 300)):
        out = autotune.attention_with_kvcache(random((2, queries, 4, 64)), k[:, :keys], v[:, :keys], **options)
        assert out.shape == (2, queries, 4, 64) and not plans.repeatable


def test_calls_are_counted(gpu):
    before = sum(autotune.stats().values())
    arrays, options = decode()
    for _ in range(5):
        autotune.attention_with_kvcache(*arrays, **options)
    assert sum(autotune.stats().values()) == before + 5

"""What the simulator reports: each kind of mistake in a kernel of a few lines, found for every seed, and named where it is."""

import numpy as np
import pytest
from simulator_probes import finding, run

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2, 7)
EXCHANGE = """
    SharedArray<u32> words{smem_base()};
    words.set(thread_id(), p.in[thread_id()]);
    %s
    p.out[thread_id()] = words.get(thread_id() ^ %d);
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sync, partner", [("sync_block();", 33), ("sync_block();", 1), ("sync_warp();", 1),
                                           ("named_barrier_sync(3, 64);", 40)])
def test_an_exchange_through_shared_memory_is_right(seed, sync, partner):
    out, simulation = run(EXCHANGE % (sync, partner), threads=64, seed=seed)
    assert simulation.findings == ()
    assert (out == (np.arange(64) ^ partner)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sync, partner", [("", 33), ("sync_warp();", 33), ("", 1)])
def test_a_missing_barrier_is_a_race_whatever_the_order(seed, sync, partner):
    found = finding(EXCHANGE % (sync, partner), threads=64, seed=seed)
    assert found.kind in ("race", "uninitialised read")
    assert "words.get" in found.text or "words.set" in found.text


def test_a_race_names_both_threads_and_lines():
    found = finding(EXCHANGE % ("", 1) + "sync_warp(); words.set(thread_id() ^ 32, 0);", threads=64, seed=0)
    assert found.kind in ("race", "uninitialised read") and "lane" in found.message
    found = finding("""
    SharedArray<u32> word{smem_base()};
    word.set(0, thread_id());
    """)
    assert found.kind == "race" and "word.set" in found.text
    assert "writes shared byte 0, which warp 0 lane" in found.message and "nothing orders the two" in found.message


def test_threads_may_write_the_same_value_each_before_its_own_reads():
    body = """
    SharedArray<u32> word{smem_base()};
    word.set(0, 5);
    p.out[thread_id()] = word.get(0);
    """
    for seed in SEEDS:
        out, simulation = run(body, seed=seed, out_words=32)
        assert simulation.findings == () and (out == 5).all()


def test_reading_what_nobody_wrote():
    found = finding("p.out[thread_id()] = SharedArray<u32>{smem_base()}.get(thread_id() + 7);")
    assert found.kind == "uninitialised read" and "shared byte" in found.message


@pytest.mark.parametrize("body, words", [
    ("SharedArray<u32>{smem_base()}.set(1024 + thread_id(), 1);", "writes 4 bytes at shared byte"),
    ("p.out[0] = load_shared_16(smem_base() - 16).word[0];", "reads 16 bytes at shared byte -16"),
    ("store_global_16(p.out + 64, Chunk{});", "0 bytes after the end of out"),
    ("store_global_16(p.out - 4, Chunk{});", "16 bytes before out"),
    ("store_global_16(p.in, Chunk{});", "writes to byte 0 of in, an input"),
    ("copy_async_16(smem_base(), p.in + 64, true);", "0 bytes after the end of in"),
    ("copy_async_16(smem_base() + 4096, p.in, true);", "the block has 4096"),
])
def test_an_access_outside(body, words):
    found = finding(f"if (thread_id() == 0) {{ {body} }}")
    assert found.kind == "out of bounds" and words in found.message and body.split("(")[0][:12] in found.text


@pytest.mark.parametrize("seed, body, words", [
    (1, "p.out[0] = p.in[p.n + p.zero];", "after the end of in"),
    (0, "p.out[0] = p.in[-1 - p.zero];", "before in"),
    (1, "p.out[p.n] = 1;", "after the end of out"),
    (0, "p.out[0] = *static_cast<const u32*>(nullptr + p.zero);", "null pointer"),
    (0, "p.out[0] = p.in[1ll << 33];", "near no array"),
])
def test_a_plain_pointer_that_leaves_its_array_is_reported_with_its_line(seed, body, words):
    if "nullptr" in body:
        body = "const u32* nothing = p.in - reinterpret_cast<u64>(p.in) / 4; p.out[0] = *nothing;"
    found = finding(f"if (thread_id() == 0) {{\n    {body}\n    }}", seed=seed)
    assert found.kind in ("out of bounds", "undefined behaviour")
    assert found.kind == "undefined behaviour" or words in found.message
    assert not found.text or found.text == body  # "" where there is no addr2line


def test_a_misaligned_access():
    assert finding("store_shared_4(smem_base() + 2, 1);").kind == "misaligned"
    assert finding("copy_async_16(smem_base() + 8, p.in, true);").kind == "misaligned"
    assert finding("copy_async_16(smem_base(), p.in + 1, true);").kind == "misaligned"


def test_undefined_behaviour_of_the_kernel():
    tile = "float tile[4] = {}; for (int i = 0; i <= 4 + p.zero; ++i) tile[i] = i; p.out[0] = u32(tile[p.zero]);"
    assert finding(tile).kind == "undefined behaviour"
    assert finding("p.out[0] = 1 << (p.n - 30);").kind == "undefined behaviour"
    assert finding("p.out[0] = 7 / p.zero;").kind == "undefined behaviour"


def test_lanes_that_miss_a_warp_operation_deadlock():
    found = finding("if (lane_id() != 5) sync_warp();")
    assert found.kind == "deadlock"
    assert "warp 0 lane 5 has finished" in found.message and "warp 0 lane 0 to warp 0 lane 4 [line" in found.message


def test_lanes_that_meet_in_different_operations():
    found = finding("if (lane_id() < 16) sync_warp();\n    else p.out[0] = shuffle(1, 0);")
    assert found.kind == "barrier misuse" and "calls one at line" in found.message


def test_a_warp_that_misses_a_barrier_deadlocks():
    found = finding("if (warp_id() != 1) sync_block();", threads=96)
    assert found.kind == "deadlock" and "waits at barrier 0, where 64 of 96 threads have arrived" in found.message
    assert "warp 1 lane 0 to warp 1 lane 31 has finished" in found.message and "sync_block()" in found.text


@pytest.mark.parametrize("body, words", [
    ("named_barrier_sync(1, warp_id() ? 64 : 96);", "is for"),
    ("named_barrier_sync(1, 80);", "barrier 1 for 80 threads"),
    ("named_barrier_sync(16, 96);", "barrier 16 for 96 threads"),
    ("named_barrier_sync(1, 256);", "in a block of 96"),
])
def test_barriers_that_cannot_be(body, words):
    found = finding(body, threads=96)
    assert found.kind == "barrier misuse" and words in found.message


def test_a_kernel_that_does_not_end_is_stopped():
    found = finding("while (p.zero == 0) opaque(0);", timeout_s=1)
    assert found.kind == "timeout" and "1 s" in found.message


def test_a_stack_that_is_too_small_is_named():
    found = finding("volatile float big[200000]; for (int i = p.n; i >= 0; --i) big[i * 3000] = i;")
    assert found.kind in ("crash", "out of bounds")


# Asynchronous copies

COPY = """
    copy_async_16(smem_base() + thread_id() * 16, p.in + thread_id() %% 4 * 4, thread_id() < 32);
    copy_async_commit();
    copy_async_16(smem_base() + 1024 + thread_id() * 16, p.in, true);
    copy_async_commit();
    %s
    p.out[thread_id()] = load_shared_16(smem_base() + (thread_id() ^ 1) * 16).word[1];
"""


@pytest.mark.parametrize("seed", range(6))
def test_copies_arrive_in_time_and_zeros_where_nothing_is_read(seed):
    out, simulation = run(COPY % "copy_async_wait<1>(); sync_block();", threads=64, seed=seed)
    partner = np.arange(64) ^ 1
    assert simulation.findings == () and (out == np.where(partner < 32, partner % 4 * 4 + 1, 0)).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("wait", ["", "copy_async_wait<1>();", "sync_block();", "sync_block(); copy_async_wait<1>();",
                                  "copy_async_wait<2>(); sync_block();"])
def test_a_copy_that_is_not_waited_for_or_not_passed_on(wait, seed):
    found = finding(COPY % wait, threads=64, seed=seed)
    assert found.kind in ("race", "uninitialised read")


def test_a_copy_over_what_others_still_read():
    found = finding("""
    SharedArray<u32> words{smem_base()};
    words.set(thread_id(), thread_id());
    sync_block();
    p.out[thread_id()] = words.get(thread_id() ^ 32);
    copy_async_16(smem_base() + thread_id() / 4 * 16, p.in, true);
    """, threads=64)
    assert found.kind == "race" and ("copy_async_16" in found.text or "words.get" in found.text)


# mbarriers

PIPE = """
    const u32 full = smem_base() + 1024, empty = full + 8;
    SharedArray<u32> words{smem_base()};
    if (thread_id() == 0) { mbarrier_init(full, 32); mbarrier_init(empty, %(consumers)d); }
    sync_block();
    for (int i = 0; i < 4; ++i) {
        if (warp_id() == 0) {
            mbarrier_wait(empty, i %% 2 ^ %(empty)d);
            words.set(lane_id(), i * 100 + lane_id());
            mbarrier_arrive(full);
        } else {
            mbarrier_wait(full, i %% 2 ^ %(full)d);
            p.out[i * 32 + lane_id()] = words.get(lane_id() ^ 3);
            %(sync)s
            if (lane_id() == 0) mbarrier_arrive(empty);
        }
    }
"""
RIGHT = {"consumers": 1, "empty": 1, "full": 0, "sync": "sync_warp();"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipe_of_mbarriers(seed):
    out, simulation = run(PIPE % RIGHT, threads=64, out_words=128, seed=seed)
    assert simulation.findings == ()
    assert (out.reshape(4, 32) == np.arange(4)[:, None] * 100 + (np.arange(32) ^ 3)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("change, kinds", [
    ({"empty": 0}, ("deadlock",)), ({"full": 1}, ("race", "uninitialised read", "deadlock")), ({"consumers": 2}, ("deadlock",)),
    ({"sync": ""}, ("race",)),
])
def test_a_broken_pipe(change, kinds, seed):
    found = finding(PIPE % {**RIGHT, **change}, threads=64, out_words=128, seed=seed)
    assert found.kind in kinds
    if found.kind == "deadlock":
        assert "waits for parity" in found.message and "arrivals" in found.message


@pytest.mark.parametrize("body, words", [
    ("mbarrier_arrive(smem_base());", "no initialised mbarrier"),
    ("if (thread_id() == 0) { mbarrier_init(smem_base(), 1); mbarrier_init(smem_base(), 1); }", "already initialised"),
    ("if (thread_id() == 0) mbarrier_init(smem_base(), p.zero);", "at least 1"),
    ("if (thread_id() == 0) { mbarrier_init(smem_base(), 1); mbarrier_arrive_expect(smem_base(), 16);"
     " mbarrier_arrive(smem_base()); }", "still waits for 16 bytes"),
])
def test_mbarriers_that_cannot_be(body, words):
    found = finding(body)
    assert found.kind == "barrier misuse" and words in found.message


def test_an_mbarrier_used_before_its_initialisation_is_known():
    found = finding("if (thread_id() == 0) mbarrier_init(smem_base(), 64);\n    sync_warp();\n    mbarrier_arrive(smem_base());",
                    threads=64)
    assert found.kind in ("race", "barrier misuse")


# The run as a whole


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_gives_the_same_run_again(seed):
    body = """
    SharedArray<u32> words{smem_base()};
    words.set(thread_id() / 4, thread_id());
    p.out[thread_id()] = words.get(thread_id() / 4);
    """
    (first, one), (second, two) = run(body, threads=64, seed=seed), run(body, threads=64, seed=seed)
    assert one.findings == two.findings and (first == second).all()


def test_blocks_run_in_an_order_that_depends_on_the_seed():
    body = "if (thread_id() == 0) { p.out[block_id()] = p.out[63]; p.out[63] = block_id(); }"
    orders = {tuple(run(body, grid=8, seed=seed)[0][:8]) for seed in range(6)}
    assert len(orders) > 2


def test_every_block_starts_with_fresh_shared_memory():
    found = finding("""
    if (block_id() == 0) SharedArray<u32>{smem_base()}.set(thread_id(), 1);
    else p.out[0] = SharedArray<u32>{smem_base()}.get(thread_id());
    """, grid=2)
    assert found.kind == "uninitialised read"


def test_many_findings_are_told_once_each():
    body = "".join(f"p.out[{i}] = SharedArray<u32>{{smem_base()}}.get({i});\n" for i in range(40))
    _, simulation = run(body)
    assert 5 < len(simulation.findings) <= 20
    assert len({f.line for f in simulation.findings}) == len(simulation.findings)

"""One small kernel for each group of wrappers in lib/ptx/, to be run on the GPU and on the simulator with the same data.

A probe reads p.in (uint32 words, made by `data`) and writes p.out. What it computes must depend on every wrapper that it
covers; `float_error` is the relative error (to the largest value) that instructions which only approximate may differ by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np


def words(count: int) -> Callable:
    return lambda random: random.integers(0, 2**32, count, dtype=np.uint32)


def floats(count: int, scale: float = 1.0, specials: tuple = ()) -> Callable:
    def make(random):
        values = (random.standard_normal(count) * scale).astype(np.float32)
        values[:len(specials)] = specials
        return values.view(np.uint32)

    return make


def halves(count: int, dtype: str) -> Callable:
    """Normal numbers of 16 bits, two in each of `count` words."""
    def make(random):
        values = random.standard_normal(2 * count).astype(np.float32)
        bits = values.astype(np.float16).view(np.uint16) if dtype == "fp16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint32)

    return make


@dataclass(frozen=True)
class Probe:
    name: str
    covers: tuple[str, ...]
    body: str
    data: Callable = words(256)
    out_words: int = 256
    threads: int = 32
    grid: int = 1
    cluster: int = 1
    smem_bytes: int = 8192
    arch: int = 75
    float_error: float = 0.0  # 0: the same bits, any NaN being equal to any other
    floats: bool = False  # whether the output is float32
    headers: tuple[str, ...] = ()  # beyond base.cuh and all of lib/ptx/: "tile", or "wgmma bf16", "wgmma fp16"
    mapped: bool = False  # whether Params has the tensor maps `load` (of p.in) and `store` (of p.out, behind RAW_WORDS)

    def __str__(self) -> str:
        return self.name


SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 3e38, 65504.0, 65519.9, 65520.0, 1e-8, 6e-8, 5.96e-8, 1.0)

EACH_WORD = """
    const float* in = reinterpret_cast<const float*>(p.in);
    for (int i = thread_id(); i < 256; i += 32) p.out[i] = {0};"""
EACH = EACH_WORD.replace("p.out[i]", "reinterpret_cast<float*>(p.out)[i]")

# Every thread puts what it read in its own place of shared memory, then takes its partner's.
FILL = "for (int i = thread_id(); i < {0}; i += {1}) SharedArray<u32>{{smem_base()}}.set(i, p.in[i]);\n    sync_block();\n    "
TILE = "using Tile = SmemTile<32, 64>; const Tile tile{smem_base()};\n    "
FRAGMENT = "for (int i = 0; i < 4; ++i) p.out[{0} + thread_id() * 4 + i] = r[i];\n    "

PIPE = """
    const u32 full = smem_base() + 1024, empty = full + 8;
    SharedArray<u32> words{smem_base()};
    if (thread_id() == 0) {
        mbarrier_init(full, 32), mbarrier_init(empty, 1);
        mbarrier_init_fence();
    }
    sync_block();
    for (int i = 0; i < 8; ++i) {
        if (warp_id() == 0) {
            mbarrier_wait(empty, i % 2 ^ 1);
            words.set(lane_id(), p.in[i * 32 + lane_id()]);
            mbarrier_arrive(full);
        } else {
            mbarrier_wait(full, i % 2);
            p.out[i * 32 + lane_id()] = words.get(lane_id() ^ 3) + i;
            sync_warp();
            if (lane_id() == 0) mbarrier_arrive(empty);
        }
    }"""

COPIES = """
    const u32 mine = (smem_base() + thread_id() * 16) ^ thread_id() / 2 % 2 * 16;
    {0}(mine, p.in + thread_id() * 4, true);
    copy_async_commit();
    {0}(mine + 1024, p.in + 4 * (63 - thread_id()), thread_id() % 3 != 0);
    copy_async_commit();
    copy_async_wait<1>();
    sync_block();
    const Chunk first = load_shared_16(smem_base() + (thread_id() ^ 33) * 16);
    copy_async_wait<0>();
    sync_block();
    const Chunk second = load_shared_16(smem_base() + 1024 + (thread_id() ^ 17) * 16);
    for (int i = 0; i < 4; ++i) p.out[thread_id() * 8 + i] = first.word[i], p.out[thread_id() * 8 + 4 + i] = second.word[i];"""

MMA = """
    float c[4];
    u32 a[4];
    for (int i = 0; i < 4; ++i) a[i] = p.in[thread_id() * 4 + i], c[i] = 0.125f * thread_id() - i;
    mma_m16n8k16<{0}>(c, a, p.in[128 + thread_id() * 2], p.in[129 + thread_id() * 2]);
    for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(p.out)[thread_id() * 4 + i] = c[i];"""

C_TO_A = """
    const float* x = reinterpret_cast<const float*>(p.in) + thread_id() * 8;
    const float left[4] = {{x[0], x[1], x[2], x[3]}}, right[4] = {{x[4], x[5], x[6], x[7]}};
    u32 r[4];
    c_to_a<{0}>(r, left, right);
    """ + FRAGMENT.format(0)

# Every block leaves words for the others, which read one after the other, from the last block to the first.
CLUSTER = """
    const u32 mine = smem_base() + thread_id() * 32;
    const int blocks = 3, rank = block_id() % blocks;
    const SharedArray<float> words{mine};
    for (int i = 0; i < 8; ++i) words.set(i, float(p.in[i * 32 + thread_id()] & 1023) + 1000 * block_id());
    sync_cluster();
    float sum = 0;
    for (int other = blocks - 1; other >= 0; --other) {
        const u32 there = remote_address(smem_base() + (thread_id() ^ 5) * 32, other);
        const Floats4 four = load_remote_floats(there);
        float first, second;
        load_remote_floats(there + 16, first, second);
        sum = 3 * sum + four.x[0] + 2 * four.x[1] + 4 * four.x[2] + 8 * four.x[3] + 16 * first + 32 * second;
    }
    reinterpret_cast<float*>(p.out)[block_id() * 32 + thread_id()] = sum + rank;
    leave_cluster();"""

TICKETS = """
    float* partial = reinterpret_cast<float*>(p.out) + 64;
    store_global_floats(partial + block_id() * 128 + thread_id() * 4, {float(p.in[thread_id()] & 255), 1, 2, float(block_id())});
    fence_device();
    sync_block();
    const SharedArray<u32> last{smem_base()};
    if (thread_id() == 0) last.set(0, take_ticket(p.out, grid_size() - 1));
    sync_block();
    if (last.get(0) != u32(grid_size() - 1)) return;
    fence_device();
    sync_block();
    float sum = 0;
    for (int block = 0; block < grid_size(); ++block) {
        const Floats4 v = load_global_floats(partial + block * 128 + thread_id() * 4);
        sum += v.x[0] + 10 * v.x[1] + 100 * v.x[2] + 1000 * v.x[3];
    }
    reinterpret_cast<float*>(p.out)[32 + thread_id()] = sum;
    for (int block = 0; block < grid_size(); ++block)
        store_global_floats(partial + block * 128 + thread_id() * 4, sum, partial[block * 128 + (thread_id() * 4) + 2]);"""

# A tensor of 16-bit elements (batch, rows, heads, columns), the boxes that are copied, and where they begin: inside, across
# the ends, before the begin.
TENSOR, BOX = (2, 21, 3, 72), {"rows": 8, "columns": 64, "heads": 2}
TENSOR_WORDS, RAW_WORDS = 4536, 4 * 512
BOXES = """
    const u32 full = smem_base() + 4096;
    const SharedArray<u32> words{smem_base()};
    const int at[4][4] = {{0, 0, 0, 0}, {64, 15, 1, 1}, {-8, -3, 2, 1}, {0, 19, 2, 0}};
    if (thread_id() == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_fence();
        tma_prefetch_map(p.load);
    }
    sync_block();
    for (int n = 0; n < 4; ++n) {
        if (thread_id() == 0) {
            mbarrier_arrive_expect(full, 2048);
            tma_load(smem_base(), p.load, full, at[n][0], at[n][1], at[n][2], at[n][3], CACHE_EVICT_LAST);
        }
        mbarrier_wait(full, n & 1);
        for (int i = thread_id(); i < 512; i += 64) {
            p.out[n * 512 + i] = words.get(i);
            words.set(i, words.get(i) ^ 0x00010001);
        }
        fence_async_proxy();
        sync_block();
        if (thread_id() == 0) {
            // A store may end beyond its tensor, but not begin before it: an H200 stops with an illegal instruction.
            tma_store(p.store, smem_base(), max_of(at[n][0], 0), max_of(at[n][1], 0), at[n][2], at[n][3]);
            tma_store_commit();
            tma_store_wait_read();
        }
        sync_block();
    }"""

# S (64 x 48) = A B^T over 64 columns, both in shared memory; O (64 x 72) += P V over 48 rows of V, P in registers.
WGMMA = """
    const SharedArray<u32> words{smem_base()};
    for (int i = thread_id(); i < 6656; i += 128) words.set(i, p.in[i]);
    fence_async_proxy();
    sync_block();
    float s[6][4] = {}, o[9][4];
    u32 a[3][4];
#pragma unroll
    for (int k = 0; k < 3; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[k][i] = p.in[(k * 128 + thread_id()) * 4 + i];
#pragma unroll
    for (int n = 0; n < 9; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] = 0.01f * thread_id() - n + i;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
        wgmma_qk(s, descriptor_advance(descriptor_k_major(smem_base()), k * 32),
                 descriptor_advance(descriptor_k_major(smem_base() + 8192), k * 32), k > 0);
    wgmma_commit();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 3; ++k)
        wgmma_pv(o, a[k], descriptor_advance(descriptor_mn_major(smem_base() + 14336, 6144), k * 2048),
                 k > 0 || p.in[0] % 2 == 0);
    wgmma_commit();
    wgmma_wait<1>(s);
    pin(a);
    float* out = reinterpret_cast<float*>(p.out) + thread_id() * 60;
#pragma unroll
    for (int n = 0; n < 6; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n * 4 + i] = s[n][i];
    wgmma_wait<0>(o);
#pragma unroll
    for (int n = 0; n < 9; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[24 + n * 4 + i] = o[n][i];"""

WGMMA_SHARED = """
    SharedArray<u32> words{smem_base()};
    for (int i = thread_id(); i < 6656; i += 128) words.set(i, p.in[i]);
    fence_async_proxy();
    sync_block();
    float c[9][4];
#pragma unroll
    for (int n = 0; n < 9; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[n][i] = 0.01f * thread_id() - n + i;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 3; ++k)
        wgmma_shared(c, descriptor_advance(descriptor_k_major(smem_base()), k * 32),
                     descriptor_advance(descriptor_mn_major(smem_base() + 14336, 6144), k * 2048), k > 0 || p.in[0] % 2 == 0);
    wgmma_commit();
    wgmma_wait<0>(c);
#pragma unroll
    for (int n = 0; n < 9; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(p.out)[thread_id() * 36 + n * 4 + i] = c[n][i];"""

WGMMA_NAMES = ("wgmma_qk", "wgmma_pv", "wgmma_fence", "wgmma_commit", "wgmma_wait", "descriptor_k_major", "descriptor_mn_major",
               "descriptor_advance", "pin")

PROBES = (
    Probe("exp2", ("exp2_approx",), EACH.format("exp2_approx(in[i])"), floats(256, 60, SPECIAL), floats=True, float_error=-4e-7),
    Probe("log2", ("log2_approx",), EACH.format("log2_approx(fabsf(in[i]))"), floats(256, 60, SPECIAL), floats=True,
          float_error=1e-7),  # of the largest: near 1 the instruction promises 2^-22, not a relative error
    Probe("reciprocal", ("reciprocal_approx",), EACH.format("reciprocal_approx(in[i])"), floats(256, 9, SPECIAL), floats=True,
          float_error=-3e-7),
    Probe("rounded product", ("multiply_rounded",), EACH.format("multiply_rounded(in[i], 3.1f)"), floats(256, 9, SPECIAL),
          floats=True),
    Probe("four 8-bit floats", ("pack_e4m3",), EACH_WORD.format("pack_e4m3(in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + "
                                                                "3])"),
          floats(1024, 99, SPECIAL), arch=89),
    Probe("pack2 bf16", ("pack2",), EACH_WORD.format("pack2<bf16>(in[2 * i], in[2 * i + 1])"), floats(512, 9, SPECIAL), arch=80),
    Probe("pack2 fp16", ("pack2",), EACH_WORD.format("pack2<fp16>(in[2 * i], in[2 * i + 1])"), floats(512, 9, SPECIAL), arch=80),
    Probe("every half to float", ("half_to_float",), "for (int i = thread_id(); i < 65536; i += 32) "
          "reinterpret_cast<float*>(p.out)[i] = half_to_float(fp16{static_cast<unsigned short>(i)});", out_words=65536,
          floats=True),
    Probe("float to half", ("float_to_half",), EACH_WORD.format("float_to_half(in[i]).bits"), floats(256, 300, SPECIAL)),
    Probe("8-bit floats", ("unpack_e4m3", "part_pairs"), """
    for (int i = thread_id(); i < 128; i += 32) {
        unpack_e4m3(p.in[i], p.out[3 * i], p.out[3 * i + 1]);
        p.out[3 * i + 2] = part_pairs(p.in[i]);
    }""", lambda random: np.concatenate([np.arange(256, dtype=np.uint8), random.integers(0, 256, 256, np.uint8)]).view(np.uint32),
          out_words=384, arch=89),
    Probe("tanh", ("tanh_exact",), EACH.format("tanh_exact(in[i])"), floats(256, 9, SPECIAL), floats=True, float_error=-3e-7),
    Probe("floats as integers", ("float_bits", "bits_float", "max_of_three"), EACH.format(
        "bits_float(max_of_three(float_bits(in[i]), float_bits(in[(i + 1) % 256]), float_bits(in[(i + 2) % 256])))"),
        floats(256, 9, SPECIAL), floats=True),
    Probe("dependent launch", ("wait_for_dependencies", "launch_dependents", "prefetch_l2", "load_guess"), """
    launch_dependents();
    prefetch_l2(p.in + thread_id() * 8, 32);
    const int guess = load_guess(reinterpret_cast<const int*>(p.in) + 32 + thread_id());
    wait_for_dependencies();
    wait_for_dependencies(p.in, p.out, thread_id() % 2);
    p.out[thread_id()] = p.in[thread_id()] + 1;
    p.out[32 + thread_id()] = guess;""", arch=90),
    Probe("opaque", ("opaque",), "p.out[thread_id()] = opaque(p.in[thread_id()]) + opaque(thread_id());"),
    Probe("places and sums of rows", ("c_row", "c_column", "row_max", "row_sum"), """
    const float x = reinterpret_cast<const float*>(p.in)[thread_id()];
    float* out = reinterpret_cast<float*>(p.out);
    out[thread_id()] = row_max(x), out[32 + thread_id()] = row_sum(x), out[64 + thread_id()] = c_row() * 100 + c_column();""",
          floats(32), floats=True),
    Probe("c to a bf16", ("c_to_a",), C_TO_A.format("bf16"), floats(256), arch=80),
    Probe("c to a fp16", ("c_to_a",), C_TO_A.format("fp16"), floats(256), arch=80),
    Probe("accesses", ("store_shared_4", "store_shared_16", "load_shared_16", "store_global_16"), """
    for (int i = 0; i < 4; ++i) store_shared_4(smem_base() + thread_id() * 16 + i * 4, p.in[thread_id() * 4 + i] + i);
    sync_warp();
    const Chunk there = load_shared_16(smem_base() + (thread_id() ^ 5) * 16);
    store_shared_16(smem_base() + 1024 + thread_id() * 16, there);
    sync_warp();
    store_global_16(p.out + thread_id() * 4, load_shared_16(smem_base() + 1024 + (thread_id() ^ 9) * 16));"""),
    Probe("accesses of floats", ("store_shared_floats", "load_shared_floats", "store_global_floats", "load_global_floats",
                                 "load_global_4"), """
    const float* in = reinterpret_cast<const float*>(p.in);
    float first, second;
    load_global_floats(in + 2 * thread_id(), first, second);
    store_shared_floats(smem_base() + thread_id() * 8, second, first);
    sync_warp();
    const Floats4 v = load_shared_floats(smem_base() + (thread_id() ^ 3) / 2 * 16);
    const Floats4 w = load_global_floats(in + 64 + thread_id() * 4);
    float* out = reinterpret_cast<float*>(p.out);
    store_global_floats(out + thread_id() * 4, {v.x[0] + w.x[3], v.x[1] + w.x[2], v.x[2] + w.x[1], v.x[3] + w.x[0]});
    store_global_floats(out + 128 + thread_id() * 2, v.x[0], w.x[1]);
    p.out[192 + thread_id()] = load_global_4(p.in + 255 - thread_id());""", floats(256), floats=True),
    Probe("clusters", ("sync_cluster", "leave_cluster", "remote_address", "load_remote_floats"), CLUSTER, out_words=6 * 32,
          grid=6, cluster=3, arch=90, floats=True),
    Probe("tickets", ("fence_device", "take_ticket", "store_global_floats", "load_global_floats"), TICKETS,
          out_words=64 + 6 * 128, grid=6, floats=True),
    Probe("copies", ("copy_async_16", "copy_async_commit", "copy_async_wait"), COPIES.replace("{0}", "copy_async_16"), threads=64,
          out_words=512, arch=80),
    Probe("streamed copies 128", ("stream_async_16",), COPIES.replace("{0}", "stream_async_16<128>"), threads=64,
          out_words=512, arch=80),
    Probe("streamed copies 256", ("stream_async_16",), COPIES.replace("{0}", "stream_async_16<256>"), threads=64,
          out_words=512, arch=80),
    Probe("ldmatrix", ("ldmatrix_x4", "ldmatrix_x4_trans"), FILL.format(1024, 32) + "u32 r[4];\n    "
          "ldmatrix_x4(r, smem_base() + (thread_id() * 7 % 64) * 16);\n    " + FRAGMENT.format(0) +
          "ldmatrix_x4_trans(r, smem_base() + (thread_id() * 5 % 64) * 16);\n    " + FRAGMENT.format(128), words(1024), 256),
    Probe("fragments of tiles", ("load_a", "load_b", "load_b_transposed"), FILL.format(1024, 32) + TILE + "u32 r[4];\n    "
          "load_a(r, tile, 16, 4);\n    " + FRAGMENT.format(0) + "load_b(r, tile, 16, 2);\n    " + FRAGMENT.format(128) +
          "load_b_transposed(r, tile, 0, 6);\n    " + FRAGMENT.format(256), words(1024), 384, headers=("tile",)),
    Probe("stmatrix", ("store_a",), FILL.format(1024, 32) + TILE + """u32 r[4];
    for (int i = 0; i < 4; ++i) r[i] = p.in[thread_id() * 4 + i] ^ 0x5555;
    store_a(tile, lane_id(), 16, 2, r);
    sync_block();
    for (int i = thread_id(); i < 1024; i += 32) p.out[i] = SharedArray<u32>{smem_base()}.get(i);""", words(1024), 1024, arch=90,
          headers=("tile",)),
    Probe("stmatrix transposed", ("store_a_transposed",), FILL.format(1024, 32) + TILE + """u32 r[4];
    for (int i = 0; i < 4; ++i) r[i] = p.in[thread_id() * 4 + i] ^ 0x5555;
    store_a_transposed(tile, lane_id(), 16, 2, r);
    sync_block();
    for (int i = thread_id(); i < 1024; i += 32) p.out[i] = SharedArray<u32>{smem_base()}.get(i);""", words(1024), 1024, arch=90,
          headers=("tile",)),
    Probe("copies of pairs", ("copy_async_8",), """
    copy_async_8(smem_base() + thread_id() * 8, p.in + 2 * (63 - thread_id()), thread_id() % 3 != 0);
    copy_async_commit();
    copy_async_wait<0>();
    sync_block();
    for (int i = 0; i < 2; ++i) p.out[thread_id() * 2 + i] = SharedArray<u32>{smem_base()}.get((thread_id() ^ 5) * 2 + i);""",
          threads=64, out_words=128, arch=80),
    Probe("sums in global memory", ("add_global_floats",), """
    const float* in = reinterpret_cast<const float*>(p.in);
    const float four[4] = {in[thread_id()], in[thread_id() + 32], in[thread_id() + 64], 1.0f};
    for (int i = 0; i < 2; ++i) add_global_floats(reinterpret_cast<float*>(p.out) + (thread_id() + i) % 32 * 4, four);""",
          floats(256), 128, arch=90, floats=True, float_error=1e-6),
    Probe("mma bf16", ("mma_m16n8k16",), MMA.replace("{0}", "bf16"), halves(192, "bf16"), 128, arch=80, floats=True,
          float_error=1e-5),
    Probe("mma fp16", ("mma_m16n8k16",), MMA.replace("{0}", "fp16"), halves(192, "fp16"), 128, arch=80, floats=True,
          float_error=1e-5),
    Probe("mma turing", ("mma_m16n8k16", "mma_m16n8k8"), MMA.replace("{0}", "half_turing") + """
    float half[4] = {1, 2, 3, 4};
    mma_m16n8k8(half, p.in[thread_id() * 4 + 3], p.in[thread_id() * 4], p.in[190 - thread_id()]);
    for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(p.out)[128 + thread_id() * 4 + i] = half[i];""",
          halves(192, "fp16"), 256, floats=True, float_error=1e-5),
    Probe("pack2 turing", ("pack2",), EACH_WORD.format("pack2<half_turing>(in[2 * i], in[2 * i + 1])"), floats(512, 9, SPECIAL)),
    Probe("copies through registers", ("load_global_16",), """
    const Chunk first = load_global_16(p.in + thread_id() * 4, true);
    const Chunk second = load_global_16(p.in + 4 * (63 - thread_id()), thread_id() % 3 != 0);
    for (int i = 0; i < 4; ++i) p.out[thread_id() * 8 + i] = first.word[i], p.out[thread_id() * 8 + 4 + i] = second.word[i];""",
          threads=64, out_words=512),
    Probe("a pipe of mbarriers", ("mbarrier_init", "mbarrier_init_fence", "mbarrier_arrive", "mbarrier_wait"), PIPE,
          threads=64, arch=90),
    Probe("named barriers", ("named_barrier_sync", "named_barrier_arrive", "warpgroup_id", "registers_release",
                             "registers_claim"), """
    SharedArray<u32> words{smem_base()};
    if (warpgroup_id() == 0) {
        registers_release<40>();
        for (int i = 0; i < 2; ++i) {
            words.set(thread_id(), p.in[thread_id() + i]);
            named_barrier_arrive(2, 256);
            named_barrier_sync(3, 256);
        }
    } else {
        registers_claim<232>();
        for (int i = 0; i < 2; ++i) {
            named_barrier_sync(2, 256);
            p.out[i * 128 + thread_id() % 128] = words.get(thread_id() % 128 ^ 70);
            named_barrier_arrive(3, 256);
        }
    }""", threads=256, arch=90),
    Probe("boxes of a tensor", ("tma_load", "tma_store", "tma_store_commit", "tma_store_wait_read", "tma_prefetch_map",
                                "fence_async_proxy", "mbarrier_arrive_expect"), BOXES, words(TENSOR_WORDS),
          RAW_WORDS + TENSOR_WORDS, threads=64, arch=90, mapped=True),
    Probe("wgmma bf16", WGMMA_NAMES, WGMMA, halves(6656, "bf16"), 128 * 60, threads=128, smem_bytes=26624, arch=90, floats=True,
          float_error=1e-5, headers=("wgmma bf16",)),
    Probe("wgmma fp16", WGMMA_NAMES, WGMMA, halves(6656, "fp16"), 128 * 60, threads=128, smem_bytes=26624, arch=90, floats=True,
          float_error=1e-5, headers=("wgmma fp16",)),
    *(Probe(f"wgmma of shared memory {dtype}", ("wgmma_shared",), WGMMA_SHARED, halves(6656, dtype), 128 * 36, threads=128,
            smem_bytes=26624, arch=90, floats=True, float_error=1e-5, headers=(f"wgmma {dtype}",)) for dtype in ("bf16", "fp16")),
)

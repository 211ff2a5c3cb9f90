"""A kernel with a realistic space and a synthetic time, for testing the tuner without templates or a GPU."""

import hashlib
import math

from autotune.cuda.compile import Binary, Resources
from autotune.core.config import Config, Parameter
from autotune.core.gpu import by_name
from autotune.kernels.base import Kernel, Step
from autotune.core.measurement import Measurement
from autotune.core.problem import Problem
from autotune.tuner.builder import Built

H200 = by_name("nvidia-h200")
PROBLEM = Problem.parse("forward-bf16-b1-h32x8-q8192-k8192-d128-causal")


def _fits(static, values, gpu):
    need = _smem(static, values)
    return None if need <= gpu["smem_per_block_bytes"] else f"needs {need} bytes of shared memory"


def _warps_divide(static, values, gpu):
    return None if values["block_m"] % (16 * values["warps"]) == 0 else "each warp owns 16 rows"


def _smem(static, values):
    rows = (0 if values["q_regs"] else values["block_m"]) + 2 * values["stages"] * values["block_n"]
    return rows * static.head_dim * 2


class FakeKernel(Kernel):
    name = "fake_mma"
    template = "fake.cu.j2"
    summary = "stands in for forward_mma"
    min_arch = 80
    fields = ()
    aligned = True
    rules = (_fits, _warps_divide)
    parameters = (
        Parameter("block_m", (32, 64, 96, 128, 192, 256), "compile", "rows of Q a block owns"),
        Parameter("block_n", (16, 32, 48, 64, 80, 96, 112, 128), "compile", "keys in a tile"),
        Parameter("warps", (2, 4, 8), "compile", "warps in a block"),
        Parameter("stages", (1, 2, 3, 4), "compile", "tiles of K and V in flight"),
        Parameter("q_regs", (False, True), "compile", "Q stays in registers"),
        Parameter("order", ("forward", "reverse"), "compile", "tile order"),
        Parameter("min_blocks", (1, 2, 3), "compile", "launch bound"),
        Parameter("smem_bytes", (), "compile", "dynamic shared memory", derived=True),
        Parameter("carveout", (-1, 50, 100), "launch", "percent"),
    )

    def reject(self, problem, gpu):
        return None if gpu.arch >= self.min_arch else "needs sm_80"

    def derive(self, static, values):
        return {"smem_bytes": _smem(static, values)}

    def default(self, problem, gpu):
        return self.config(problem.static, dict(block_m=128, block_n=64, warps=4, stages=2, q_regs=False, order="forward",
                                                min_blocks=1, carveout=-1))

    def plan(self, problem, config):
        return [Step("fake", 1, 32 * config["warps"], config["smem_bytes"], config["carveout"])]

    def estimate_us(self, problem, config, gpu, registers):
        config = Config(self.name, tuple((p.name, config[p.name]) for p in self.parameters))  # reads values only
        return synthetic_us(config) * (1 + 0.3 * math.sin(hash_of(config)))


class SlowKernel(FakeKernel):
    name = "fake_simt"

    def estimate_us(self, problem, config, gpu, registers):
        return 30 * super().estimate_us(problem, config, gpu, registers)


FAKE = FakeKernel()


def __getattr__(name):
    """SPACE, whose 13,000 configs take a second: worker processes do without."""
    if name != "SPACE":
        raise AttributeError(name)
    return FAKE.space(PROBLEM, H200)


def hash_of(config):
    return int(config.digest, 16)


def synthetic_us(config):
    """A rugged time: interactions, register pressure, a few per cent of repeatable noise by config. Of real kernels noise
    alone."""
    if not config.kernel.startswith("fake"):
        return 50 + hash_of(config) % 997 / 10
    m, n, w, s = (config[k] for k in ("block_m", "block_n", "warps", "stages"))
    pressure = (m * n / (32 * w) + m * 128 / (32 * w)) / 200 + 0.25 * config["q_regs"]
    time = 600 * (1 + 24 / m + 12 / n + 0.1 * abs(math.log2(s / 2)) + 0.4 * max(0, pressure - 1) ** 2)
    time *= 1 + 0.05 * (w == 2) - 0.03 * (config["q_regs"] and pressure < 1) - 0.04 * (config["order"] == "reverse")
    time *= 1 + 0.08 * abs(config["min_blocks"] - (2 if m <= 64 else 1)) + 0.01 * (config["carveout"] == 50)
    return time * (1 + 0.03 * (hash_of(config) % 997) / 997)


def fails(config):
    """As a spill would: too many registers asked for."""
    if not config.kernel.startswith("fake"):
        return False
    return config["block_m"] * (config["block_n"] + 128) / (32 * config["warps"]) * config["min_blocks"] > 300


class FakeBuilder:
    """Stands in for `autotune.tuner.builder.Builder`. `same(config)` says which configs compile to the same binary."""

    def __init__(self, version="1", same=lambda config: config.text):
        self.version, self.same = version, same

    def source_sha256(self, static, config):
        return hashlib.sha256(f"{self.version} {config.text}".encode()).hexdigest()

    def build(self, static, config):
        if fails(config):
            return Measurement(outcome="spilled", message="fake spills 8 bytes")
        digest = hashlib.sha256(repr(self.same(config)).encode()).hexdigest()
        binary = Binary("", "sm_90", "cubin", b"", digest, "13.0.88", {"fake": Resources(128, 0)}, (), "")
        return Built(config, binary, self.source_sha256(static, config))

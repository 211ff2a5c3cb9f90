"""A `Surveyor` without a GPU: times are a kernel's own estimate, bent in a way that depends on the config; one config is
wrong."""

from autotune.core.gpu import by_name
from autotune.kernels import KERNELS

GPU = by_name("nvidia-h200")


def true_us(problem, config):
    """What the imaginary GPU takes: the estimate, times up to 1.3 by config and size."""
    bend = int(config.digest, 16) % 7 / 20
    size = (problem.seqlen_q * problem.batch % 64) / 64
    return KERNELS[config.kernel].account_us(problem, config, GPU) * (1 + bend * size)


class Surveyor:
    def __init__(self, device, wrong="", crashing=""):
        self.wrong, self.crashing = wrong, crashing

    def check(self, problem, config, binary):
        if self.crashing and self.crashing in config.text:
            raise SystemExit(3)
        return "wrong" if self.wrong and self.wrong in config.text else ""

    def times(self, problem, entries, rounds, captures=1):
        return [true_us(problem, config) for config, _ in entries]

    def unload(self, binaries):
        pass

"""`autotune worker` and `autotune tune` on a simulated GPU: the fake kernel, the fake evaluator and an H200 from the catalogue.

    python tuner_worker.py STORAGE [LINGER] [MODEL] [SKEW_SECONDS]
"""

import contextlib
import sys
import time

import tuner_targets
from tuner_fakes import FAKE, FakeBuilder

from autotune import kernels
from autotune.core.gpu import by_name
from autotune.tuner import session, work
from autotune.tuner.explore import Budget
from autotune.tuner.session import Effort

EFFORT = Effort(Budget(trials=12, seconds=20.0, worth=0.0), finalists=2, final_seconds=0.05)


class Slow(tuner_targets.FakeEvaluator):
    """As long as a small kernel takes, so that workers overlap."""

    def evaluate(self, *arguments):
        time.sleep(0.02)
        return super().evaluate(*arguments)


def simulate(model="nvidia-h200"):
    kernels.KERNELS.clear()
    kernels.KERNELS[FAKE.name] = FAKE
    gpu = by_name(model)
    work.detect = lambda device: gpu
    work.Builder = lambda gpu: FakeBuilder()
    work.EVALUATOR = "tuner_worker:Slow"
    work.gpu_lock = lambda device, say: contextlib.nullcontext()
    session.EFFORTS.update(quick=EFFORT)
    work.LOOK_SECONDS = 0.1


def skewed(seconds):
    """This host's clock is off by so much."""
    now = time.time
    time.time = lambda: now() + seconds


if __name__ == "__main__":
    simulate(*sys.argv[3:4])
    skewed(float(sys.argv[4]) if sys.argv[4:] else 0.0)
    work.work(sys.argv[1], linger=float(sys.argv[2]))

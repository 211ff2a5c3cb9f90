"""A judge for tests of the pipeline: needs no GPU, looks at the binary, and fails as the batch size says."""

import os

from autotune.check.judge import Verdict


class FakeJudge:
    def __init__(self, device=0):
        self.device = device

    def check(self, case, config, binary, kinds, seed):
        assert config.kernel in binary.entries and kinds and seed == 7
        if case.problem.batch == 5:
            os._exit(3)
        if case.problem.batch == 6:
            raise RuntimeError("an illegal address")
        return Verdict(False, 9.0, "off") if case.problem.batch == 4 else Verdict(True, 0.25, "")

"""Worker targets that misbehave. They run in a child process."""

import os
import signal
import time


class Faulty:
    def __init__(self, start="well"):
        if start == "raise":
            raise RuntimeError("no device here")
        if start == "exit":
            print("libcuda is broken", flush=True)
            os._exit(3)
        self.calls = 0

    def echo(self, value):
        self.calls += 1
        return value, self.calls, os.getpid()

    def hang(self):
        time.sleep(600)

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self):
        print("Xid 31", flush=True)
        os._exit(7)

    def fail(self):
        raise ValueError("illegal address")

    def big(self, size):
        return b"x" * size


class FakeEvaluator:
    """Stands in for `autotune.tuner.evaluate.Evaluator`: synthetic times, and `faults` by the number of stages."""

    def __init__(self, device=0, faults=(), log=None):
        import tuner_fakes  # noqa: F401  now, not within a call's time

        self.faults, self.log, self.problem = dict(faults), log, None

    def _note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{what}\n")

    def open(self, problem):
        self._note(f"open {problem}")
        if problem.batch == 13:
            raise MemoryError("out of memory")
        self.problem = problem

    def evaluate(self, problem, config, binary, best_us):
        from tuner_fakes import synthetic_us

        from autotune.core.measurement import Measurement

        assert problem == self.problem
        self._note(f"evaluate {config.text}")
        fault = self.faults.get(config.values.get("stages"))
        if fault == "hang":
            time.sleep(600)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "raise":
            raise RuntimeError("an illegal memory access was encountered")
        if fault:
            return Measurement(outcome=fault, message=f"{fault} at row 3")
        return Measurement(outcome="ok", time_us=synthetic_us(config), samples_us=(synthetic_us(config),) * 3)

    def healthy(self):
        self._note("healthy")
        return "refused" in self.faults

    def final(self, problem, entries, seconds):
        self._note(f"final {len(entries)}")
        if "final" in self.faults:
            os._exit(9)
        return [self.evaluate(problem, config, binary, None) for config, binary in entries]


class Paced(FakeEvaluator):
    """Device 2 takes 5 % longer than the others, device 3 cannot be used."""

    def __init__(self, device=0):
        if device == 3:
            raise RuntimeError("an uncorrectable ECC error")
        super().__init__(device)
        self.factor = 1.05 if device == 2 else 1 + 0.003 * device

    def evaluate(self, *arguments):
        from autotune.core.measurement import Measurement

        return Measurement("ok", time_us=self.factor * super().evaluate(*arguments).time_us)

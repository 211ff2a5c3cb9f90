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

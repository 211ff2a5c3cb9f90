"""Stands for benchmarks/drop_in.py's `work` in a process of its own, which imports nothing: what each step does is its name."""

import os
import time


def work(names, connection):
    for name in names:
        connection.send(("begins", {}))
        if name == "dies":
            os._exit(9)
        if name == "hangs":
            time.sleep(60)
        connection.send(("ends", {"failed": "ValueError"} if name == "raises" else {"answer": name}))
        if name == "spoils":
            os._exit(1)

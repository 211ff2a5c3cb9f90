"""autotune as a drop-in on a GPU: models of real sizes and random weights, four layers each, against eager and SDPA.

    python benchmarks/drop_in.py --out benchmarks/results/drop-in-h200.yaml [--seconds 360] [--steps host,static,...]

Needs torch and transformers; takes about six minutes. The steps (`drop_in_steps`) run one after the other in a process of their
own. One that raises, dies, spoils the GPU for what follows or takes too long is a line of the result: the others run in a new
process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import traceback
from pathlib import Path

import yaml

MOST_SECONDS = 120  # of one step


def work(names: list[str], connection) -> None:
    """Runs steps and sends what begins and ends. Stops where the GPU is no longer usable."""
    import drop_in_steps as steps
    import torch

    steps.prepare()
    for name in names:
        connection.send(("begins", {}))
        result: dict = {}
        try:
            steps.run(name, result)
        except Exception as error:
            result["failed"] = said(error)
        connection.send(("ends", result))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises for good once a kernel has read where it must not
            torch.cuda.empty_cache()


def said(error: Exception) -> list[str]:
    """What happened, and where: no paths of this machine."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    return [f"{type(error).__name__}: {str(error)[:1500]}",
            *(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames)]


def results(names: list[str], seconds: float, target=work, most_seconds: float = MOST_SECONDS):
    """(name, result) of each step, in processes of which a new one begins where the last one ended too early."""
    spawn, end, names = multiprocessing.get_context("spawn"), time.perf_counter() + seconds, list(names)
    while names and time.perf_counter() < end:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(names, theirs), daemon=True)
        process.start()
        theirs.close()
        useful, first = True, True
        while names and useful:
            begin = time.perf_counter()
            outcome, began, useful = _of_one(ours, min(most_seconds, end - begin), process)
            if began or first:  # else its process ended between two steps, of what the one before has left
                yield names.pop(0), {**outcome, "took_s": round(time.perf_counter() - begin, 1)}
            first = False
        process.kill()
        process.join()
    for name in names:
        yield name, {"failed": f"not begun: {seconds:g} s had passed"}


def _of_one(connection, seconds: float, process) -> tuple[dict, bool, bool]:
    """(result of the next step, whether it began, whether its process can go on)"""
    end, began = time.perf_counter() + max(seconds, 0), False
    try:
        while connection.poll(max(end - time.perf_counter(), 0)):
            kind, result = connection.recv()
            if kind == "ends":
                return result, True, True
            began = True
        return {"failed": f"stopped after {seconds:.0f} s"}, True, False
    except (EOFError, OSError):
        process.join(5)
        return {"failed": f"its process ended with {process.exitcode}"}, began, False


def summary(steps: dict) -> dict:
    """What the whole comes to; -1 for what was not measured."""
    models = [result for name, result in steps.items() if name.startswith("model.")]
    static, graphs, host = (steps.get(name, {}) for name in ("static", "graphs", "host"))
    breaks, recompiles = ([one.get(key, -1) for one in (graphs, static)] for key in ("graph_breaks", "recompiles"))
    return {"models": len(models), "right": sum(bool(result.get("right")) for result in models),
            "graph_breaks": -1 if -1 in breaks else sum(breaks), "recompiles": -1 if -1 in recompiles else max(recompiles),
            "host_us_eager": host.get("eager_us", -1), "host_us_compiled": host.get("compiled_us", -1),
            "sdpa_us": host.get("sdpa_us", -1), "failed": [name for name, result in steps.items() if "failed" in result]}


def main() -> None:
    import drop_in_steps

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=360, help="of all steps together")
    parser.add_argument("--steps", default=",".join(drop_in_steps.STEPS))
    options = parser.parse_args()
    command = f"python benchmarks/drop_in.py --out benchmarks/results/{options.out.name}"
    steps: dict = {}
    for name, result in results(options.steps.split(","), options.seconds):
        steps[name] = result
        print(name, result, flush=True)
        whole = dict(command=command, summary=summary(steps), versions=drop_in_steps.versions(), steps=steps)
        options.out.write_text(yaml.safe_dump(whole, sort_keys=False, width=130), encoding="utf-8")


if __name__ == "__main__":
    main()

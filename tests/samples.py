"""Legal configs for tests, made from what a kernel declares and nothing else."""

import itertools


def searched(kernel, static):
    """Every config of `kernel`, legal or not, in declared order; the last parameter changes fastest."""
    parameters = [p for p in kernel.parameters if not p.derived]
    for values in itertools.product(*(p.values for p in parameters)):
        yield kernel.config(static, {p.name: value for p, value in zip(parameters, values)})


def drawn(kernel, static, gpu, random, tries=2000):
    """A legal config, drawn with `random`; listing the whole space for one would take seconds."""
    for _ in range(tries):
        config = kernel.config(static, kernel.draw(random.choice))
        if kernel.illegal(static, config, gpu) is None:
            return config
    raise AssertionError(f"none of {tries} draws of {kernel.name} is legal for {static.text}")


def legal(kernel, static, gpu, step=1):
    """Legal ones of every `step`-th config."""
    return (c for c in itertools.islice(searched(kernel, static), 0, None, step) if kernel.illegal(static, c, gpu) is None)

"""Legal configs for tests, made from what a kernel declares and nothing else."""

import itertools


def searched(kernel, static):
    """Every config of `kernel`, legal or not, in declared order; the last parameter changes fastest."""
    parameters = [p for p in kernel.parameters if not p.derived]
    for values in itertools.product(*(p.values for p in parameters)):
        yield kernel.config(static, {p.name: value for p, value in zip(parameters, values)})


def legal(kernel, static, gpu, step=1):
    """Legal ones of every `step`-th config."""
    return (c for c in itertools.islice(searched(kernel, static), 0, None, step) if kernel.illegal(static, c, gpu) is None)

"""`Plan`: a kernel, its config and its loaded binary, for every problem of one bucket on one device.

    plan = plans.make(problem, device)
    plan.run(call)
"""

from __future__ import annotations

from typing import Callable

from ..device import counters, launch, streams, workspaces
from ..device.arrays import is_capturing
from ..kernels import kernel_of
from .binding import bind
from .call import Call


def lend(call: Call, beside: bool, reusing: bool) -> None:
    """Gives `call` the workspaces and counters that its launch needs. They may be used again once the call has returned, by later
    work on the stream. `reusing`: by what follows it there even before, so it must be a launch of one kernel."""
    library, capturing = call.library, is_capturing(call.stream)
    stream = None if capturing else counters.stream_id(call.stream)
    if stream is not None and call.lender == stream:
        return
    call.keep = call.keep_tickets = call.lender = None
    if call.lent:
        room = 0
        for _, floats in call.lent:
            room += floats + -floats % 4
        address = workspaces.find(call.device, stream, 4 * room) if reusing else 0
        if not address:
            call.keep = library.workspace(call.like, room, capturing)
            address = library.pointer(call.keep)
        place(call, address)
    if call.counters:
        call.tickets, call.keep_tickets = counters.take(library, call.like, call.device, stream, call.counters, capturing, beside)
    if call.keep is None and call.keep_tickets is None:
        call.lender = stream


def place(call: Call, address: int) -> None:
    """Lays out the workspaces that `call` needs one behind the other, each at a multiple of 16 bytes."""
    for name, floats in call.lent:
        setattr(call, name, address)
        address += 4 * (floats + -floats % 4)


class Plan:
    """See the module. `match` says why this config; `calls` counts launches, for `stats`; `unmapped` is what runs instead for
    arrays that the kernel's tensor maps cannot describe. With `resize`, what of the config follows from sizes is chosen for those
    of each call, else it is what the config has."""

    __slots__ = ("match", "kernel", "scale", "aligned", "unmapped", "calls", "_sized", "_pack", "_launches", "_waiting",
                 "_single", "_pack_addresses", "_params_bytes")

    def __init__(self, match, loaded: launch.Loaded, resize: bool = False):
        problem, config = match.problem, match.config
        self.match, self.kernel = match, kernel_of(config)
        self.scale = problem.head_dim**-0.5
        self.aligned = self.kernel.aligned
        self.calls = 0
        self.unmapped: Plan | None = None
        resized = self.kernel.resized(match.sized_for, config, match.gpu) if resize else None
        self._sized, self._pack, self._pack_addresses, packer = bind(problem, config, lambda each: each * match.gpu.sms,
                                                                     resized=resized)
        self._params_bytes = packer.size
        first, *rest = self.kernel.plan(problem, config)
        self._single = not rest
        later = [loaded.bound(step).enqueue for step in rest]
        self._launches = {size: (loaded.bound(first._replace(cluster=size)).enqueue, *later)
                          for size in range(1, self.kernel.most_cluster(config) + 1)}
        # Of two launches that begin together, the later one waits for SMs: it must not come into place while what ran before them
        # still runs. Sequences of a mixed batch have lengths that only the device knows, so no cluster merges their splits.
        self._waiting = (loaded.bound(first._replace(dependent=False, cluster=1)).enqueue, *later)

    def run(self, call: Call, lend: Callable[[Call, bool, bool], None] = lend, alone: bool = True) -> None:
        """Launches on the call's stream; not `alone`: after another launch that begins with it. Raises `tensormap.Unmappable` for
        arrays that this plan's kernel cannot take in place; `plans.without_maps` has the plan that can."""
        params = self._ready(call, lend, False)
        self._launch(self._launches[call.cluster] if alone else self._waiting, call, call.stream, params)
        launch.free.append(params)

    def repeat(self, call: Call) -> None:
        """`run` for a call that has been run, at other addresses. It gets Params of its own, in which only these change."""
        if call.lent or call.counters:
            lend(call, False, self._single)
        params = call.params
        if params is None:
            params = call.params = launch.Params(self._params_bytes)
            self._pack(call, params.buffer)
        else:
            self._pack_addresses(call, params.buffer)
        self._launch(self._launches[call.cluster], call, call.stream, params)

    def _ready(self, call: Call, lend: Callable[[Call, bool, bool], None], beside: bool) -> launch.Params:
        """Params: all that a launch needs to be done on the call's own stream has been enqueued."""
        call.lent, call.counters, call.cluster, call.tickets, call.lender = (), 0, 1, 0, None
        call.grids = self._sized(call)
        if call.lent or call.counters:
            lend(call, beside, self._single and not beside)
        try:
            params = launch.free.pop()
        except IndexError:
            params = launch.Params()
        self._pack(call, params.buffer)
        return params

    def _launch(self, launches: tuple, call: Call, stream: int, params: launch.Params) -> None:
        for enqueue, grid in zip(launches, call.grids):
            if grid:
                enqueue(grid, stream, params.address)
        self.calls += 1

    def run_beside(self, call: Call, other: Plan, twin: Call) -> None:
        """Launches `other` for the twin and this plan for the call, to run at the same time: `other` on a stream beside the
        call's, first, so that this one's blocks fill the SMs that its last blocks leave idle. Raises as `run` does, before
        anything is launched."""
        params = other._ready(twin, lend, True)
        beside = streams.fork(call.device, call.stream)
        try:
            other._launch(other._launches[1], twin, beside.stream, params)
            launch.free.append(params)
            self.run(call, alone=False)
        finally:
            beside.join()

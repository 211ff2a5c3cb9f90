"""When a call on torch tensors must not launch by itself, but be seen by torch: while torch traces.

Torch's operators for attention stand in `integrations.ops`, above this package, so only their name is known here.
"""

from __future__ import annotations

import sys
from importlib import import_module

OPS = f"{__package__.partition('.')[0]}.integrations.ops"


class Traced:
    """What an adapter of torch's tensors asks of torch."""

    kind = "cuda"  # of devices, as torch has it
    always = False  # whether every call is torch's business
    ops = None  # `integrations.ops`, once `load_ops` has imported it

    def __init__(self, torch):
        self._compiling, self._modes = torch.compiler.is_dynamo_compiling, torch._C._len_torch_dispatch_stack
        self._autocast = torch.is_autocast_enabled

    def traced(self) -> bool:
        """Whether a call must go through torch's operators, because something looks on that no launch would show itself to: a
        compiler, an exporter, another mode of torch's, or autocast. 0.2 us."""
        return (self.always or self._compiling() or self._modes() or self._autocast(self.kind)) and load_ops()


def load_ops() -> bool:
    """Imports what registers torch's operators. True, for dynamo to call while it traces and to keep."""
    import_module(OPS)
    return True


load_ops._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result sets; torch is not imported here


def dispatches(kind: type) -> bool:
    """Whether a class of tensors has a way of its own to run operators."""
    return kind.__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__


def loaded_torch() -> tuple:
    """A tensor and a parameter of torch, if it has been imported."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "nn"):
        return ()
    return torch.empty(0), torch.nn.Parameter(torch.empty(0), requires_grad=False)

"""Which back end computes a module's objective.

The order is: Sparse, where rows are sparse; what the user asks for; Dense; Chained, on a GPU;
Looped for convolutions on a CPU; Vmapped, if a trial run shows that torch.func can batch the
module and that its forward leaves the buffers alone; else Looped. It is decided here alone and
told in the log.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..algorithm.contract import Batch
from ..errors import InputError, one_of
from .backend import Backend, Layout, copied, ravel
from .chained import Chained
from .dense import Dense, is_one_map
from .looped import Looped
from .modes import seeded
from .sparse import Sparse
from .vmapped import Vmapped

if TYPE_CHECKING:
    from .losses import RowLoss

ENGINES = ("auto", "stacked", "loop")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Layers that are not tried with torch.func: those with statistics of a whole batch, recurrent
# ones and those that draw.
UNBATCHED = (nn.modules.batchnorm._NormBase, nn.RNNBase, nn.modules.dropout._DropoutNd)


def objective(
    module: nn.Module,
    loss: RowLoss,
    engine: str,
    device: torch.device,
    sample: Sequence[int],
    sparse: bool = False,
) -> tuple[Backend, str]:
    """The back end for a module whose samples have this shape, and why it was chosen.

    Args:
        module: The model, on the device and in the type of the run. It is copied.
        loss: The loss of single rows.
        engine: The user's wish. "auto": whatever is fastest. "stacked": all clients and trials at
            once, or an error. "loop": one after the other.
        device: Where the run computes.
        sample: The shape of one sample, without the rows.
        sparse: Whether the rows are sparse, which one linear layer can take.

    Returns:
        The back end, and a few words for the log.

    Raises:
        InputError: The engine is not known, the module cannot be stacked as asked, or it cannot
            take sparse rows.
    """
    one_of("engine", engine, ENGINES)
    if sparse:
        back: Backend = _on_sparse_rows(module, loss, engine, sample)
        reason = "clients and trials stacked, sparse"
    else:
        back, reason = _chosen(module, loss, engine, device, sample)
    back.one_output = is_one_map(module, sample)
    return back, reason


def _chosen(
    module: nn.Module,
    loss: RowLoss,
    engine: str,
    device: torch.device,
    sample: Sequence[int],
) -> tuple[Backend, str]:
    """The back end for dense rows, and why."""
    known = Dense.fits(module, sample) or Chained.fits(module, sample)
    moved = "" if known else _moved_buffers(module, sample)
    pools = device.type == "cpu" and Chained.fits(module, sample) and _has_wide_pools(module)
    layout = torch.channels_last if pools else torch.contiguous_format
    if engine == "loop":
        return Looped(module, loss, layout), "clients one by one, as asked"
    if Dense.fits(module, sample):
        return Dense(module, loss), "clients and trials stacked"
    if Chained.fits(module, sample) and (engine == "stacked" or device.type == "cuda"):
        return Chained(module, loss), "clients and trials stacked, convolutions as matrix products"
    if engine == "auto" and device.type == "cpu" and _has_convolutions(module):
        reason = "clients one by one: on a CPU convolutions are faster so"
        return Looped(module, loss, layout), reason
    reason = _unbatched(module) or moved or _cannot_batch(module, loss, sample)
    if not reason:
        return Vmapped(module, loss), "clients and trials stacked by torch.func"
    if engine == "stacked":
        raise InputError(
            f"this model cannot be stacked ({reason}); use engine='auto' or engine='loop'"
        )
    return Looped(module, loss), f"clients one by one: {reason}"


def _on_sparse_rows(
    module: nn.Module,
    loss: RowLoss,
    engine: str,
    sample: Sequence[int],
) -> Sparse:
    """The back end for sparse rows; an error where the model or the engine needs dense ones."""
    remedy = "make the rows dense (load: layout='dense'; scipy: x.toarray())"
    if not Sparse.fits(module, sample):
        raise InputError(
            f"sparse rows need a model of one linear layer, such as 'mclr' or 'linear', got "
            f"{type(module).__name__}: use one of these, or {remedy}"
        )
    if engine == "loop":
        raise InputError(f"engine='loop' needs dense rows: use engine='auto', or {remedy}")
    return Sparse(module, loss)


def _has_convolutions(module: nn.Module) -> bool:
    """Whether any layer is a convolution."""
    return any(isinstance(m, CONVOLUTIONS) for m in module.modules())


def _has_wide_pools(module: nn.Module) -> bool:
    """Whether a chain pools in single precision, behind a convolution of several channels.

    Pools that choose the largest number are then faster with the channels of a pixel side by side.
    Other modules keep torch's usual layout: a module of one's own may rely on it.
    """
    layers = list(module.modules())
    wide = any(isinstance(m, nn.Conv2d) and m.out_channels > 1 for m in layers)
    single = all(p.dtype == torch.float32 for p in module.parameters())
    return wide and single and any(isinstance(m, nn.MaxPool2d) for m in layers)


def _moved_buffers(module: nn.Module, sample: Sequence[int]) -> str:
    """Why this module must be run as it is: its forward moves buffers; empty if it does not.

    A copy runs once on two rows, in training mode. What it says to real rows is told elsewhere.

    Raises:
        InputError: The forward does what cannot be trained, or averaged over clients.
    """
    tried = copied(module).train()
    like = ravel(module)
    rows = torch.full((2, *sample), 0.5, dtype=like.dtype, device=like.device)
    before = _state(tried)
    shapes = {(name, t.shape) for name, t in before.items()}
    versions = {name: t._version for name, t in before.items()}
    try:
        with torch.enable_grad(), seeded(0, like.device):
            out = tried(rows)
    except Exception:
        return ""
    after = _state(tried)
    odd = {name for name, _ in shapes ^ {(name, t.shape) for name, t in after.items()}}
    _refuse("adds, removes or reshapes {}: register buffers as tensors of their final shape", odd)
    given = _state(module)
    moved = set()
    for name, t in after.items():
        written = t._version != versions[name] or not (t.is_meta or torch.equal(t, given[name]))
        if written or t is not before[name]:
            moved.add(name)
    params = moved & dict(tried.named_parameters()).keys()
    _refuse("writes to {}, as max_norm does: compute with a changed copy instead", params)
    held = {name for name in moved if after[name].requires_grad}
    _refuse("leaves {} in the graph of the gradient: write .detach() where it is computed", held)
    if isinstance(out, torch.Tensor) and not out.requires_grad:
        trained = set(Layout.of(module).names)
        _refuse("gives no gradient to {}: take torch.no_grad() and .detach() out of it", trained)
    return f"its forward changes {', '.join(sorted(moved))}" if moved else ""


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _refuse(fault: str, names: Set[str]) -> None:
    """Raise InputError for a forward with this fault in tensors of these names, if any."""
    if names:
        raise InputError(f"the model's forward {fault.format(', '.join(sorted(names)))}")


def _unbatched(module: nn.Module) -> str:
    """Which layer is not tried with torch.func; empty if there is none."""
    for m in module.modules():
        if isinstance(m, UNBATCHED) and not _sees_single_rows(m):
            return f"torch.func cannot batch {type(m).__name__}"
    return ""


def _cannot_batch(module: nn.Module, loss: RowLoss, sample: Sequence[int]) -> str:
    """Why torch.func cannot batch this module; empty if it can, which is tried.

    Two clients, two trials and two rows of zeros go through the module once, forwards and
    backwards.
    """
    back = Vmapped(module, loss)
    x = ravel(module).expand(2, 2, -1)
    rows = torch.zeros(2, 2, *sample, dtype=x.dtype, device=x.device)
    targets = torch.zeros(2, 2, dtype=torch.long, device=x.device)
    weights = rows.new_full((2, 2), 0.5)
    try:
        out = back.predict(x, rows)
        back.value_and_grad(x, Batch(rows, targets, weights))
    # torch.func raises RuntimeError for what it cannot batch; other errors are the user's to see.
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        return f"torch.func cannot batch it ({first_line[:80]})"
    return "" if out.dim() == 4 else "its outputs are not [rows, classes]"


def _sees_single_rows(layer: nn.Module) -> bool:
    """Whether it is an InstanceNorm without statistics of its own, which sees one row at a time."""
    if not isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return False
    return not layer.track_running_stats

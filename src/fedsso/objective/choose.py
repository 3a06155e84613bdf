"""Which back end computes a module's objective.

The order is: Sparse, where rows are sparse; what the user asks for; Dense; Chained, on a GPU;
Looped for convolutions on a CPU; Vmapped, if a trial run shows that torch.func can batch the
module; else Looped. It is decided here alone and told in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..algorithm.contract import Batch
from ..errors import InputError, one_of
from .backend import Backend, ravel
from .chained import Chained
from .dense import Dense, is_one_map
from .looped import Looped
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
    reason = _cannot_batch(module, loss, sample)
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


def _cannot_batch(module: nn.Module, loss: RowLoss, sample: Sequence[int]) -> str:
    """Why torch.func cannot batch this module; empty if it can, which is tried.

    Two clients, two trials and two rows of zeros go through the module once, forwards and
    backwards.
    """
    for m in module.modules():
        if isinstance(m, UNBATCHED) and not _sees_single_rows(m):
            return f"torch.func cannot batch {type(m).__name__}"
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

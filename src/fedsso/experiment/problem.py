"""The live objects behind a run's settings: federation, initial model, loss, metrics.

`pose` makes a `Problem` of what users write: names become a module, a loss and metrics, and the
module gets its start. A problem can be checked before any work, on two rows of the data. The last
part of the file reads initial weights from tensors and files.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn

from .. import models
from ..algorithm import Batch
from ..data.federation import Federation
from ..engine.evaluate import Evaluator
from ..engine.gather import gathering
from ..engine.metrics import METRICS, Metric, metric
from ..engine.rounds import Rounds
from ..engine.simulate import Job
from ..errors import InputError
from ..objective.backend import Backend, Layout, buffers_into, buffers_of, ravel, unravel_into
from ..objective.choose import objective
from ..objective.losses import cross_entropy, mse, row_loss
from ..support.fingerprint import describe
from ..support.intake import Damaged, read_bytes
from ..support.seal import check as check_seal

if TYPE_CHECKING:
    from ..engine.settings import Loss, Settings

log = logging.getLogger("fedsso")


def outputs_of(fed: Federation, loss: Loss) -> int:
    """Outputs that a named model needs for these data and this loss.

    One for each class; a single one for real targets and for the logistic loss "bce".
    """
    return 1 if loss in ("bce", "mse") or not fed.classes else fed.classes


def default_loss(fed: Federation) -> str:
    """Cross-entropy for labels, squared error for real targets."""
    return "cross_entropy" if fed.classes else "mse"


@dataclass(frozen=True)
class Problem(Job):
    """A federation, an initial model, a loss and metrics as live objects, with a run's settings.

    It is everything about a run but its algorithm. Runs that share a problem can be batched.
    """

    @cached_property
    def digest(self) -> str:
        """Identity of the data. It is computed once, because it reads all rows."""
        return self.fed.digest()

    @cached_property
    def start(self) -> str:
        """Identity of the initial model: its architecture, every parameter and every buffer."""
        return hashlib.sha256(describe(self.module).encode()).hexdigest()

    def without_memory(self) -> Tensor:
        """One trial's model [1, d] that takes no memory, to measure states of algorithms with."""
        x = ravel(self.module)
        return torch.empty(1, len(x), dtype=x.dtype, device="meta")

    def _sample(self) -> tuple[Backend, Tensor, Batch]:
        """The objective on the CPU, the initial model and two rows, to try things out.

        Returns:
            The objective, the model's parameters [1, 1, d], and a batch of the first and the last
            training row.
        """
        fed = self.fed
        x = ravel(self.module).to("cpu")
        rows = fed.train_rows[[0, -1]].cpu()[None]
        device = self.settings.torch_device
        module = self.module.to("cpu")
        engine = self.settings.engine
        f, _ = objective(module, self.loss, engine, device, fed.sample_shape, fed.is_sparse)
        f.buffers = torch.zeros(0)
        f.l2 = self.settings.l2
        weight = x.new_full((1, 2), 0.5)
        return f, x[None, None], gathering(fed.to("cpu"), x.dtype).batch(rows, weight)

    def grants(self, asks: str) -> None:
        """Raise InputError unless model and loss have what an algorithm asks for.

        It is tried out on two rows: no other way tells whether a user's function has second
        derivatives.

        Args:
            asks: "hvp" (second derivatives), "rows" (a linear model with one output), "targets"
                (labels that can be drawn) or nothing.
        """
        if not asks:
            return
        try:
            f, x, batch = self._sample()
            if asks == "hvp":
                f.hvp(x, torch.ones_like(x), batch)
            elif asks == "rows":
                f.rows(x, batch)
            else:
                f.targets(x, batch, batch.weight)
        except InputError:
            raise
        except Exception as error:  # a user's module or loss may raise anything
            raise InputError(
                f"this algorithm needs second derivatives, which the model or the loss does not "
                f"have ({error}); use fedsso or another first-order client"
            ) from error

    def check(self) -> None:
        """Find an unsuitable device, engine, module, loss or metric before any work.

        The model predicts two rows, and the loss and its gradient are computed for them. Metrics of
        the user's own are computed as well.

        Raises:
            InputError: One of them raised something; the message has the text of that error. Or
                `stop_at` is set where there is no accuracy.
        """
        self._check_batches()
        if self.loss is mse and self.settings.stop_at is not None:
            raise InputError(
                "stop_at is an accuracy, which the loss mse does not have; leave it out"
            )
        try:
            f, x, batch = self._sample()
            outputs = f.predict(x, batch.x).shape[-2]
            if self.loss is cross_entropy and outputs < self.fed.classes:
                raise InputError(
                    f"the model has {outputs} outputs for {self.fed.classes} classes; give it one "
                    "per class"
                )
            f.value_and_grad(x, batch)
            self._check_metrics(f, x)
        except InputError:
            raise
        except Exception as error:  # a user's module or loss may raise anything
            shape = tuple(self.fed.sample_shape)
            raise InputError(
                f"the model cannot process samples of shape {shape}, or the loss cannot process "
                "its outputs: "
                f"{error}"
            ) from error

    def _check_metrics(self, f: Backend, x: Tensor) -> None:
        """Refuse a metric of the user's own that fails, or whose result is not one number.

        Args:
            f: The objective on the CPU.
            x: The initial model [1, 1, d].
        """
        fed = self.fed.to("cpu")
        rows = fed.test_rows
        device = self.settings.torch_device
        own = {name: one for name, one in self.metrics.items() if one not in METRICS.values()}
        for name, one in own.items() if len(rows) else ():

            def there(z: Tensor, y: Tensor, one: Metric = one) -> Tensor:
                """The metric where it will be computed, which may have tensors on that device."""
                return one(z.to(device), y.to(device)).cpu()

            evaluate = Evaluator(f, fed, gathering(fed, x.dtype), {name: there})
            try:
                self._try_metric(evaluate, x[0], rows)
            except Exception as error:
                raise InputError(
                    f"the metric {name} failed ({error}); it takes outputs [rows, classes] and "
                    f"targets [rows], and returns a number"
                ) from error

    @torch.no_grad()
    def _try_metric(self, evaluate: Evaluator, x: Tensor, rows: Tensor) -> None:
        """Compute a metric on two rows; if that fails, on all of them, where it must not fail.

        Two rows may have the same label, which some metrics cannot bear.
        """
        buffers = buffers_of(self.module)[None]
        try:
            evaluate(x, buffers, rows[[0, -1]])
        except Exception:
            evaluate(x, buffers, rows)

    def _check_batches(self) -> None:
        """Refuse a batch of one row where there is BatchNorm, which cannot be trained on it.

        The last batch of a pass over a client's rows is what the others leave: it may be one row.
        """
        norms = nn.modules.batchnorm._BatchNorm
        if not any(isinstance(part, norms) for part in self.module.modules()):
            return
        rounds = Rounds(self.fed, self.settings)
        last = rounds.sizes - (rounds.per_epoch - 1) * rounds.width
        if (last == 1).any():
            client = int(np.argmax(last == 1))
            raise InputError(
                f"client {client} has {rounds.sizes[client]} rows and so a batch of one, on which "
                f"BatchNorm cannot be trained; change batch_size={self.settings.batch_size} or use "
                f"GroupNorm"
            )


def pose(fed: Federation, model: str | nn.Module, settings: Settings) -> Problem:
    """The problem that a user's names and objects describe; the user's module is copied.

    Args:
        fed: The federated data.
        model: A name, or a module, which is left as it is.
        settings: The run options: loss, metrics, start, seed, floating-point type.

    Raises:
        InputError: A name is unknown, or the loss cannot be used with these targets.
    """
    check_federation(fed)
    if not isinstance(model, str | nn.Module):
        raise InputError(f"model must be a name or an nn.Module object, got {model!r}")
    if isinstance(model, nn.Module):
        _check_sizes(model)
    wish = _chosen_loss(fed, settings)
    if isinstance(model, str):
        module = build_model(model, fed, seed=settings.seed, loss=wish)
    else:
        module = copy.deepcopy(model)
    module = module.to(settings.torch_dtype)  # first: a start in float64 keeps all its digits
    initialise(module, settings.init, model, fed, settings.seed)
    return Problem(fed, module, row_loss(wish), _metrics(settings.metrics), settings)


def check_federation(fed: object) -> None:
    """Refuse what is no federation."""
    if not isinstance(fed, Federation):
        raise InputError(
            f"a federation is needed, got {fed!r}; make one with fedsso.load or "
            f"Federation.from_clients"
        )


def _check_sizes(model: nn.Module) -> None:
    """Refuse a module with lazy layers, which get their sizes from the first batch they see."""
    lazy: Any = nn.modules.lazy.LazyModuleMixin
    for name, part in model.named_modules():
        if isinstance(part, lazy) and part.has_uninitialized_params():
            raise InputError(
                f"the layer {name or type(part).__name__} has no size yet ({type(part).__name__}); "
                f"call the model once with a batch of samples, or give it its sizes"
            )


def check_names(settings: Settings) -> None:
    """Refuse a device, a loss or a metric that does not exist; no data are needed for that."""
    settings.torch_device  # noqa: B018  # it raises for a device that is not there
    if settings.loss is not None:
        row_loss(settings.loss)
    _metrics(settings.metrics)


def _chosen_loss(fed: Federation, settings: Settings) -> Loss:
    """The loss that was asked for, or that suits the targets; refused where it cannot be meant.

    A warning tells if targets look like labels, but are floats: they are taken as real numbers.
    """
    wish = default_loss(fed) if settings.loss is None else settings.loss
    row_loss(wish)  # raises for an unknown name
    if settings.loss is None and wish == "mse" and bool((fed.y == fed.y.round()).all()):
        log.warning(
            "targets are whole numbers, but floats: this is a regression; give integers for classes"
        )
    if wish == "cross_entropy" and not fed.classes:
        raise InputError(
            "loss 'cross_entropy' needs class labels, this federation has real targets; use 'mse' "
            "or 'bce'"
        )
    if wish == "bce" and fed.classes > 2:
        raise InputError(
            f"loss 'bce' needs targets 0 and 1, this federation has {fed.classes} classes; use "
            f"'cross_entropy'"
        )
    if wish == "bce" and not fed.classes and not ((fed.y >= 0) & (fed.y <= 1)).all():
        raise InputError(
            f"loss 'bce' needs targets in [0, 1], got {fed.y.min():g} to {fed.y.max():g}; use 'mse'"
        )
    return wish


def _metrics(wished: Sequence[Any]) -> dict[str, Metric]:
    """The metrics by name. Their names become columns of the trace, so they must be plain words."""
    metrics = dict(metric(m) for m in wished)
    names = [metric(m)[0] for m in wished]
    if (
        len(metrics) < len(wished)
        or "loss" in names
        or not all(re.fullmatch(r"[\w<>.-]+", n) for n in names)
    ):
        raise InputError(f"metrics need different plain names, and none may be 'loss'; got {names}")
    return metrics


def build_model(
    name: str, fed: Federation, *, seed: int = 0, loss: Loss | None = None
) -> nn.Module:
    """A model by name, sized for a federation.

    Convex models start from zero, others from torch's own draw, which the seed fixes.

    Args:
        name: A name of `fedsso.models.MODELS`.
        fed: The data, whose rows and classes decide the sizes of the first and the last layer.
        seed: Of the initial weights.
        loss: The loss it is meant for; "bce" and "mse" need a single output.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5)
    >>> fedsso.build_model("mclr", fed)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    module = models.build(name, fed.sample_shape, outputs_of(fed, loss or default_loss(fed)), seed)
    if models.MODELS[name].init == "zero":
        unravel_into(module, torch.zeros_like(ravel(module)))
    return module


def initialise(
    module: nn.Module, init: Any, model: str | nn.Module, fed: Federation, seed: int
) -> None:
    """Give a module the start that was asked for.

    Args:
        module: Its weights are replaced in place.
        init: None leaves it as it is. "zero", "default" (torch's own draw), a flat tensor, or a
            safetensors file.
        model: What the user gave: "default" leaves a module of their own as it is.
        fed: The data, for the size of the first layer.
        seed: Of the draw.

    Raises:
        InputError: It is none of these, or does not fit the model.
    """
    if init is None:
        return
    if isinstance(init, Tensor | np.ndarray):
        _start_from(module, _numbers(init))
    elif init == "zero":
        _start_from(module, torch.zeros_like(ravel(module)))
    elif init == "default":
        if isinstance(model, str):
            last = list(module.parameters())[-1].shape[0]
            _start_from(module, ravel(models.build(model, fed.sample_shape, last, seed)))
    elif isinstance(init, str | Path):
        _read_weights(module, Path(init))
    else:
        raise InputError(
            f"init must be 'zero', 'default', a tensor or a safetensors file, got {init!r}"
        )


def _numbers(init: Any) -> Tensor:
    """A start of the user's own as a tensor; refused where it holds no numbers that torch reads."""
    try:
        found = init
        if isinstance(init, np.ndarray):  # torch reads the machine's order of bytes, and forwards
            found = torch.from_numpy(init.astype(init.dtype.newbyteorder("="), "C"))
        kind = torch.complex128 if found.is_complex() else torch.float64
        return torch.from_numpy(found.detach().to("cpu", kind).numpy())
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"init must be a dense tensor or array of numbers, got dtype {init.dtype} ({error})"
        ) from error


def _start_from(module: nn.Module, x: Tensor) -> None:
    """Write a flat tensor into a module; refused if its size or its numbers are wrong."""
    d = ravel(module).numel()
    if x.numel() != d:
        raise InputError(
            f"init has {x.numel()} numbers, the model has d = {d} parameters: {Layout.of(module)}"
        )
    if x.is_complex() or not x.isfinite().all():
        raise InputError(
            "init holds complex, NaN or infinite numbers; a start must be real and finite"
        )
    unravel_into(module, x.reshape(-1))


def _read_weights(module: nn.Module, path: Path) -> None:
    """Read a state dict, or the model of a run's checkpoint, from a safetensors file.

    A checkpoint is recognised by its tensors "model" and "buffers". So a run can start where
    another one ended.
    """
    if not path.exists():
        raise InputError(
            f"init={str(path)!r} is neither 'zero', 'default' nor a safetensors file that is there"
        )
    data = read_bytes(path, "checkpoint")
    if check_seal(data) is False:
        raise Damaged(
            f"init={str(path)!r} is damaged: its checksum does not match its content; use another "
            f"file"
        )
    try:
        tensors = parse_safetensors(data)
    except (
        Exception
    ) as error:  # safetensors raises its own and the standard errors for a damaged file
        raise InputError(
            f"init={str(path)!r} is neither 'zero', 'default' nor a safetensors file ({error})"
        ) from error
    if {"model", "buffers"} <= tensors.keys():
        _start_from(module, tensors["model"])
        held, own = tensors["buffers"].numel(), buffers_of(module).numel()
        if held != own:
            raise InputError(
                f"init={str(path)!r} holds {held} numbers in buffers, the model has {own}"
            )
        with torch.no_grad():
            buffers_into(module, tensors["buffers"])
        return
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise InputError(f"init={str(path)!r} does not fit the model: {error}") from error
    _start_from(module, ravel(module))

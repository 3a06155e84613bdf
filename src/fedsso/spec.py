"""The settings of a run: checked, written to TOML, read back, and turned into the live objects that a run needs."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn

from . import models
from .algorithm import Algorithm
from .algorithms import ALGORITHMS, make, name_of
from .data import Federation, load
from .engine.metrics import Metric, metric
from .engine.rounds import Protocol
from .engine.simulate import Job
from .errors import InputError, unknown
from .files import read_bytes
from .losses import RowLoss, cross_entropy, row_loss
from .objective import objective, ravel, unravel_into
from .schedule import Decay
from .tree import changed, fields_of, to_dict
from .version import __version__

DTYPES = {"float32": torch.float32, "float64": torch.float64}
Loss = str | Callable[[Tensor, Tensor], Tensor]
Metrics = Sequence[str | Callable[[Tensor, Tensor], float]]


class Options(TypedDict, total=False):
    """Keyword arguments that `simulate`, `sweep` and `compare` share; `DEFAULTS` holds their defaults."""

    rounds: int
    local_steps: int
    local_epochs: int | None
    batch_size: int | None
    participation: float
    drop_rate: float
    stragglers: float
    seed: int
    eval_every: int
    eval_train: bool
    init: str | Tensor | Path | None
    loss: Loss | None
    metrics: Metrics
    stop_at: float | None
    dtype: str | torch.dtype
    device: str
    engine: str


DEFAULTS: dict[str, Any] = {
    "rounds": 100,
    "local_steps": 5,
    "local_epochs": None,
    "batch_size": 100,
    "participation": 1.0,
    "drop_rate": 0.0,
    "stragglers": 0.0,
    "seed": 0,
    "eval_every": 1,
    "eval_train": False,
    "init": None,
    "loss": None,
    "metrics": ("accuracy",),
    "stop_at": None,
    "dtype": "float32",
    "device": "auto",
    "engine": "auto",
}
FREE = ("device",)  # may change without making it another run


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options, the missing ones at their defaults; each checked."""
    for name in options:
        if name not in DEFAULTS:
            raise unknown("option", name, DEFAULTS)
    full = {**DEFAULTS, **options}
    for name, least in (("rounds", 1), ("eval_every", 1)):
        if isinstance(full[name], bool) or not isinstance(full[name], int) or full[name] < least:
            raise InputError(f"{name} must be an integer >= {least}, got {name}={full[name]!r}")
    for name in ("participation", "drop_rate", "stragglers", "stop_at"):
        if isinstance(full[name], bool) or not isinstance(full[name], float | int | None):
            raise InputError(f"{name} must be a number, got {name}={full[name]!r}")
    if full["stop_at"] is not None and not 0 < full["stop_at"] <= 1:
        raise InputError(f"stop_at is an accuracy in (0, 1], got stop_at={full['stop_at']!r}")
    if isinstance(full["dtype"], torch.dtype):
        full["dtype"] = str(full["dtype"]).removeprefix("torch.")
    if full["dtype"] not in DTYPES:
        raise unknown("dtype", str(full["dtype"]), DTYPES)
    wished = [full["metrics"]] if isinstance(full["metrics"], str) else full["metrics"]
    full["metrics"] = tuple(dict.fromkeys(("accuracy", *wished)))
    protocol(full)
    return full


def protocol(options: Mapping[str, Any]) -> Protocol:
    """The part of the options that says how a round runs."""
    return Protocol(**{f.name: options[f.name] for f in fields(Protocol)})


def device_of(name: str) -> torch.device:
    """ "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; use 'auto', 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device 'cuda' was asked for but torch sees no GPU; use device='cpu' or install the CUDA build"
        )
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    return device


def outputs_of(fed: Federation, loss: Loss) -> int:
    """Outputs a named model needs: one per class, a single one for real targets and the logistic loss."""
    return 1 if loss in ("bce", "mse") or not fed.classes else fed.classes


def default_loss(fed: Federation) -> str:
    """Cross-entropy for labels, squared error for real targets."""
    return "cross_entropy" if fed.classes else "mse"


@dataclass(frozen=True)
class Context:
    """The live objects behind a run's settings."""

    fed: Federation
    module: nn.Module  # initial model
    loss: RowLoss
    metrics: dict[str, Metric]

    @cached_property
    def digest(self) -> str:
        """Identity of the data."""
        return self.fed.digest()

    @cached_property
    def start(self) -> str:
        """Identity of the initial model."""
        return hashlib.sha256(ravel(self.module).cpu().double().numpy().tobytes()).hexdigest()

    def check(self, options: Mapping[str, Any]) -> None:
        """Find an unsuitable device, engine or module before any work."""
        job, x, sample = self.job(options), ravel(self.module), self.fed.sample_shape
        try:
            f, _ = objective(job.module, job.loss, job.engine, job.device, sample)
            outputs = f.predict(x[None, None], x.new_zeros(1, 2, *sample)).shape[-2]
        except RuntimeError as error:
            raise InputError(f"the model does not take samples of shape {tuple(sample)}: {error}") from error
        if job.loss is cross_entropy and outputs < self.fed.classes:
            raise InputError(f"the model has {outputs} outputs for {self.fed.classes} classes; give it one per class")

    def job(self, options: Mapping[str, Any]) -> Job:
        """What the engine needs."""
        same = {n: options[n] for n in ("eval_every", "eval_train", "stop_at", "engine")}
        dtype, device = DTYPES[options["dtype"]], device_of(options["device"])
        return Job(
            self.fed,
            self.module,
            self.loss,
            self.metrics,
            protocol(options),
            dtype=dtype,
            device=device,
            **same,
        )


def context(fed: Federation, model: str | nn.Module, options: Mapping[str, Any]) -> Context:
    """Live objects from names (or the user's own objects); the user's module is copied."""
    wish = options["loss"] or default_loss(fed)
    loss = row_loss(wish)
    if wish == "cross_entropy" and not fed.classes:
        raise InputError(
            "loss 'cross_entropy' needs class labels, this federation has real targets; use 'mse' or 'bce'"
        )
    if wish == "bce" and fed.classes > 2:
        raise InputError(
            f"loss 'bce' needs targets 0 and 1, this federation has {fed.classes} classes; use 'cross_entropy'"
        )
    module = (
        build_model(model, fed, seed=options["seed"], loss=wish) if isinstance(model, str) else copy.deepcopy(model)
    )
    module = module.to(DTYPES[options["dtype"]])  # first: a start in float64 keeps all its digits
    initialise(module, options["init"], model, fed, options["seed"])
    metrics = dict(metric(m) for m in options["metrics"])
    return Context(fed, module, loss, metrics)


def build_model(name: str, fed: Federation, *, seed: int = 0, loss: Loss | None = None) -> nn.Module:
    """A model by name, sized for a federation; convex models start from zero, others from torch's own draw."""
    module = models.build(name, fed.sample_shape, outputs_of(fed, loss or default_loss(fed)), seed)
    if models.MODELS[name].init == "zero":
        unravel_into(module, torch.zeros_like(ravel(module)))
    return module


def initialise(
    module: nn.Module, init: str | Tensor | Path | None, model: str | nn.Module, fed: Federation, seed: int
) -> None:
    """Give a module the wished start: "zero", "default" (torch's own), a flat tensor or a safetensors file."""
    if init is None:
        return
    if isinstance(init, Tensor):
        _start_from(module, init)
    elif init == "zero":
        _start_from(module, torch.zeros_like(ravel(module)))
    elif init == "default":
        if isinstance(model, str):
            last = list(module.parameters())[-1].shape[0]
            _start_from(module, ravel(models.build(model, fed.sample_shape, last, seed)))
    else:
        _read_weights(module, Path(init))


def _start_from(module: nn.Module, x: Tensor) -> None:
    d = ravel(module).numel()
    if x.numel() != d:
        raise InputError(f"init has {x.numel()} numbers, the model has d = {d} parameters")
    if not x.isfinite().all():
        raise InputError("init holds NaN or infinite numbers")
    unravel_into(module, x.reshape(-1))


def _read_weights(module: nn.Module, path: Path) -> None:
    """Read a state dict, or the model of a run's checkpoint, from a safetensors file."""
    try:
        tensors = parse_safetensors(read_bytes(path))
    except Exception as error:  # safetensors raises its own and the standard errors for a damaged file
        raise InputError(f"init={str(path)!r} is neither 'zero', 'default' nor a safetensors file ({error})") from error
    if "model" in tensors:
        _start_from(module, tensors["model"])
        return
    missing = module.load_state_dict(tensors, strict=False)
    if missing.missing_keys or missing.unexpected_keys:
        raise InputError(
            f"{path} does not fit the model: missing {missing.missing_keys}, unknown {missing.unexpected_keys}"
        )


@dataclass(frozen=True)
class Spec:
    """The settings of one run as plain values."""

    data: Mapping[str, Any]  # load(**data) rebuilds the federation; {} for own arrays
    digest: str  # of the federation
    model: str  # a name, or "own" for a user's module
    start: str  # digest of the initial model
    sample: tuple[int, ...]
    outputs: int
    algorithm: str
    hyper: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    trial: int = 0
    short: Mapping[str, str] = field(default_factory=dict)  # what the label shows

    @property
    def seed(self) -> int:
        """Seed of everything but the partition."""
        return int(self.options["seed"])

    @property
    def label(self) -> str:
        """Algorithm and the settings that differ from its defaults."""
        return " ".join([self.algorithm, *(f"{k}={v}" for k, v in self.short.items())])

    def folder(self, index: int) -> str:
        """A folder name for this run among others."""
        name = re.sub(r"[^A-Za-z0-9.=_-]+", "_", f"{self.label} seed={self.seed}")
        return f"{index:04d}-{name}"[:100]

    @property
    def record(self) -> Algorithm:
        """The algorithm's record."""
        return make(self.algorithm, {k: Decay(**v) if isinstance(v, dict) else v for k, v in self.hyper.items()})

    @property
    def identity(self) -> str:
        """A digest of everything that decides the result."""
        options = {k: v for k, v in self.options.items() if k not in FREE}
        parts = [self.digest, self.model, self.start, self.algorithm, dict(self.hyper), options]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def to_toml(self) -> dict[str, Any]:
        """A table for spec.toml; `fedsso run --config` takes it as well."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        if plain["batch_size"] is None:
            plain["batch_size"] = "full"
        data = {"dataset" if k == "name" else k: list(v) if isinstance(v, tuple) else v for k, v in self.data.items()}
        inner = {"version": __version__, "digest": self.digest, "start": self.start, "trial": self.trial}
        inner |= {"sample": list(self.sample), "outputs": self.outputs, "label": dict(self.short)}
        return {
            "model": self.model,
            "algorithm": self.algorithm,
            **plain,
            **({"data": data} if data else {}),
            self.algorithm: dict(self.hyper),
            "record": inner,
        }

    @classmethod
    def from_toml(cls, table: Mapping[str, Any]) -> Spec:
        """Read what `to_toml` wrote."""
        try:
            inner, algorithm = table["record"], table["algorithm"]
            if algorithm not in ALGORITHMS:
                raise unknown("algorithm", algorithm, ALGORITHMS)
            options = {k: table.get(k) for k in DEFAULTS}
            options["metrics"] = tuple(options["metrics"] or ())
            if options["batch_size"] == "full":
                options["batch_size"] = None
            data = {"name" if k == "dataset" else k: v for k, v in table.get("data", {}).items()}
            hyper = {f.name: table[algorithm].get(f.name) for f in fields_of(ALGORITHMS[algorithm])}
            return cls(
                data, inner["digest"], table["model"], inner["start"], tuple(inner["sample"]), inner["outputs"],
                algorithm, hyper, options, inner["trial"], inner["label"],
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"this spec.toml is not one of a run: {error} is missing or wrong") from error

    def federation(self) -> Federation:
        """Load the federation again."""
        if not self.data:
            raise InputError("this run used arrays of your own: give the federation from Python")
        fed = load(**self.data)
        if fed.digest() != self.digest:
            raise InputError(f"the data set {self.data['name']!r} has changed since this run: its digest differs")
        return fed

    def module(self) -> nn.Module:
        """The architecture, by name."""
        if self.model == "own":
            raise InputError("this run used a module of your own: give it to load_run(path, model=...)")
        return models.build(self.model, self.sample, self.outputs)

    def context(self, fed: Federation | None = None, model: nn.Module | None = None) -> Context:
        """The live objects of this run; own data and modules must be given."""
        if model is None and self.model == "own":
            raise InputError("this run used a module of your own: give model= from Python")
        named = {"loss": [self.options["loss"]], "init": [self.options["init"]], "metrics": self.options["metrics"]}
        own = [name for name, values in named.items() if any(str(v).startswith("own ") for v in values)]
        if own:
            raise InputError(f"this run used {own[0]} of your own: it can be resumed only by calling simulate again")
        if fed is not None and fed.digest() != self.digest:
            raise InputError("this federation is not the one of the run: their digests differ")
        return context(fed or self.federation(), model or self.model, self.options)


def specify(
    ctx: Context,
    model: str | nn.Module,
    record: Algorithm,
    options: Mapping[str, Any],
    trial: int,
    vary: Sequence[str],
) -> Spec:
    """The settings of a run as plain values; objects that TOML cannot hold go by their names."""
    fed = ctx.fed
    plain = dict(options)
    plain["metrics"] = tuple(
        m if isinstance(m, str) else f"own {getattr(m, '__name__', 'metric')}" for m in plain["metrics"]
    )
    if callable(plain["loss"]):
        plain["loss"] = f"own {getattr(plain['loss'], '__name__', 'loss')}"
    if isinstance(plain["init"], Tensor):
        plain["init"] = "own tensor"
    elif plain["init"] is not None:
        plain["init"] = str(plain["init"])
    always = {"alpha": to_dict(record)["alpha"]} if hasattr(record, "alpha") else {}
    shown = {**always, **changed(record), **{name: options[name] for name in vary}}
    short = {k: _short(v) for k, v in shown.items()}
    return Spec(
        dict(fed.source), ctx.digest, model if isinstance(model, str) else "own", ctx.start,
        tuple(fed.sample_shape), outputs_of(fed, options["loss"] or default_loss(fed)),
        name_of(record), to_dict(record), plain, trial, short,
    )  # fmt: skip


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "decay(" + ",".join(f"{v:g}" for v in value.values()) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)

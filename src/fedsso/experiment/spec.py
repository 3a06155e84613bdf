"""The settings of a run as plain values: written to TOML, read back, compared.

A `Spec` says everything that decides the result of a run, in values that a file can hold. Data
and initial models are in it by their digests, so that a change is noticed. Two digests tell runs
apart: `identity` of everything, and `point` of everything but the seed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import models
from ..algorithm.records import fields_of
from ..algorithm.schedule import decay_of
from ..algorithms import ALGORITHMS, make
from ..engine.settings import Settings
from ..engine.settings import options as run_options
from ..errors import InputError, integer, unknown
from ..support.files import write_atomic
from ..support.seal import read_sealed_toml, sealed_toml
from ..version import __version__

if TYPE_CHECKING:
    from ..algorithm import Algorithm

log = logging.getLogger("fedsso")
SPEC = "spec.toml"  # the files of a run's folder
TRACE = "trace.csv"
CHECKPOINT = "checkpoint.safetensors"
FREE = ("device",)  # may change without making it another run
EARLIER = {"memory": "none", "shapes": "none"}  # what runs did before they had the field


@dataclass(frozen=True)
class Spec:
    """The settings of one run as plain values.

    Attributes:
        data: load(**data) makes the federation again; {} for arrays of the user's own.
        digest: Of the federation.
        model: A name, or "own" for a user's module.
        start: Digest of the initial model.
        sample: The shape of one row, for building the model.
        outputs: Its outputs, for building the model.
        algorithm: The name in the registry.
        hyper: The fields of its record; a schedule is a dictionary.
        options: The run options by name, all of them.
        trial: The number of the run within its plan. It is not part of the identity.
        short: What the label shows, as texts.
    """

    data: Mapping[str, Any]
    digest: str
    model: str
    start: str
    sample: tuple[int, ...]
    outputs: int
    algorithm: str
    hyper: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    trial: int = 0
    short: Mapping[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Seed of everything but the partition."""
        return int(self.options["seed"])

    @property
    def label(self) -> str:
        """Algorithm and the settings that differ from its defaults."""
        return " ".join([self.algorithm, *(f"{k}={v}" for k, v in self.short.items())])

    def folder(self, index: int) -> str:
        """A folder name for this run among others, at most 100 characters.

        Args:
            index: The number of the run, which makes the name unique.
        """
        name = re.sub(r"[^A-Za-z0-9.=_-]+", "_", f"{self.label} seed={self.seed}")
        return f"{index:04d}-{name}"[:100]

    @property
    def record(self) -> Algorithm:
        """The algorithm's record, made anew; it checks its fields.

        Raises:
            InputError: The algorithm is the user's own and is not registered.
        """
        if self.algorithm not in ALGORITHMS:
            raise InputError(
                f"{self.algorithm} is not registered, so its record cannot be made; set "
                f"fedsso.algorithms.ALGORITHMS[{self.algorithm!r}] to its class first"
            )
        return make(
            self.algorithm,
            {k: decay_of(k, v) if isinstance(v, dict) else v for k, v in self.hyper.items()},
        )

    @property
    def _hyper(self) -> dict[str, Any]:
        """The hyper-parameters as digests count them: alike for files of earlier versions."""
        return {k: v for k, v in self.hyper.items() if k not in EARLIER or v != EARLIER[k]}

    @cached_property
    def identity(self) -> str:
        """A digest of everything that decides the result.

        A checkpoint and the trials of a sweep carry it, so that nothing is continued with, or
        taken for, a run of other settings. The device is left out: a run may move to another.
        """
        options = {k: v for k, v in self.options.items() if k not in FREE}
        parts = [self.digest, self.model, self.start, self.algorithm, self._hyper, options]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def point(self) -> str:
        """A digest of everything but the seed: runs that share it are repetitions of one setting.

        A model that is built by name starts elsewhere with another seed, so its start is left out.
        """
        options = {k: v for k, v in self.options.items() if k not in (*FREE, "seed")}
        start = self.start if self.model == "own" or options.get("init") == "own tensor" else ""
        parts = [self.digest, self.model, start, self.algorithm, self._hyper, options]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def to_toml(self) -> dict[str, Any]:
        """A table for spec.toml; `fedsso run --config` takes it as well.

        The table [record] holds what a settings file does not need: the version, the digests, and
        what the label shows.
        """
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        if plain["batch_size"] is None:
            plain["batch_size"] = "full"
        data = {
            "dataset" if k == "name" else k: list(v) if isinstance(v, tuple) else v
            for k, v in self.data.items()
        }
        inner = {
            "version": __version__,
            "digest": self.digest,
            "start": self.start,
            "trial": self.trial,
        }
        inner |= {"sample": list(self.sample), "outputs": self.outputs, "label": dict(self.short)}
        return {
            "model": self.model,
            "algorithm": self.algorithm,
            **plain,
            **({"data": data} if data else {}),
            self.algorithm: dict(self.hyper),
            "record": inner,
        }

    def save(self, path: Path) -> None:
        """Write spec.toml, sealed: a later change of the file is noticed."""
        write_atomic(path, sealed_toml(self.to_toml()))

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read what `save` wrote, or what earlier versions wrote without a seal.

        Raises:
            InputError: The file is missing, damaged, or not one of a run.
        """
        table = read_sealed_toml(path)
        try:
            return cls.from_toml(table)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @classmethod
    def from_toml(cls, table: Mapping[str, Any]) -> Spec:
        """Read what `to_toml` wrote.

        Every value is checked, because the file may have been written by somebody else. A warning
        tells if another version of fedsso wrote it. The fields of an algorithm that is not in the
        registry cannot be checked: they stay as they are, and only `record` needs the class.
        """
        try:
            inner, algorithm = table["record"], str(table["algorithm"])
            is_own = algorithm not in ALGORITHMS
            if is_own and not isinstance(table.get(algorithm), dict):
                raise unknown("algorithm", algorithm, ALGORITHMS)
            options = _options_of(table)
            data = {"name" if k == "dataset" else k: v for k, v in table.get("data", {}).items()}
            if data and not isinstance(data.get("name"), str):
                raise InputError(
                    "this spec.toml is not one of a run: [data] must name its data set: "
                    'dataset = "..."'
                )
            short = inner["label"]
            if not isinstance(short, dict) or not all(
                isinstance(value, str) for value in short.values()
            ):
                raise InputError(
                    "this spec.toml is not one of a run: record.label must be a table of texts"
                )
            hyper = dict(table[algorithm])
            if not is_own:
                names = [f.name for f in fields_of(ALGORITHMS[algorithm])]
                hyper = {name: table[algorithm].get(name, EARLIER.get(name)) for name in names}
            if inner["version"] != __version__:
                log.warning(
                    "this run was begun by fedsso %s, this is %s", inner["version"], __version__
                )
            sample = tuple(integer("sample", size, 1) for size in inner["sample"])
            found = cls(
                data, str(inner["digest"]), str(table["model"]), str(inner["start"]), sample,
                integer("outputs", inner["outputs"], 1), algorithm, hyper, options,
                integer("trial", inner["trial"], 0), short,
            )  # fmt: skip
            if not is_own:
                found.record  # noqa: B018  # it checks its fields
            return found
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"this spec.toml is not one of a run: {error} is missing or wrong"
            ) from error

    def module(self) -> nn.Module:
        """The architecture, by name, with weights that do not matter.

        Raises:
            InputError: It was a module of the user's own.
        """
        if self.model == "own":
            raise InputError(
                "this run used a module of your own: give it to load_run(path, model=...)"
            )
        return models.build(self.model, self.sample, self.outputs)

    @property
    def settings(self) -> Settings:
        """The run options as the record that the engine takes."""
        return Settings.of(self.options)


def data_name(data: Mapping[str, Any]) -> str:
    """What people call the data of a run: the name of the set, or of the files if they are one's
    own.

    Args:
        data: The settings of the federation, as `Spec.data` has them.

    Returns:
        The name; "" for arrays of one's own.

    >>> data_name({"name": "csv", "files": ["/srv/hospitals/east.csv", "/srv/hospitals/west.csv"]})
    'hospitals'
    """
    files = data.get("files")
    if not isinstance(files, list | tuple) or not files:
        return str(data.get("name", ""))
    paths = [PurePath(str(file)) for file in files]
    if len(paths) == 1:
        return paths[0].name
    folders = {path.parent for path in paths}
    if len(folders) == 1 and folders.pop().name:
        return paths[0].parent.name
    return f"{paths[0].name} and {len(paths) - 1} more files"


def _options_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """The run options in a table of settings, checked and completed.

    Metrics stay as they are written: those of the user's own are names that cannot be looked up.
    """
    known = [one.name for one in run_options()]
    given = {name: table[name] for name in known if name in table}
    if given["batch_size"] == "full":
        given["batch_size"] = None
    full = Settings.of(given).values()
    full["metrics"] = tuple(given["metrics"])
    return full

"""What is to be run: every record under every seed, checked before anything is written.

A plan is a list of runs. Python's `simulate`, `compare` and `sweep` and the commands of the same
names all make their plans here, so that each setting is read and checked once.

The first part reads what users write. `plan` makes the runs, `check` and `suited` refuse what
cannot run, and the last part deals with the folders of runs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from ..algorithm import Algorithm
from ..algorithm.records import OTHER_NAMES, fields_of
from ..algorithms import ALGORITHMS, make
from ..engine import checkpoint
from ..engine.ranks import team
from ..engine.settings import Settings, options
from ..engine.simulate import admit, attendance_of, fitted
from ..engine.uplink import uplink
from ..errors import InputError, integer, number, one_of
from ..objective.backend import Layout
from ..objective.losses import mse
from ..support.files import check_writable, write_atomic
from ..support.intake import limits
from ..support.lock import Lock
from ..support.seal import read_sealed_toml, sealed_toml
from ..support.trees import nbytes
from .grids import grid
from .problem import Problem, check_federation, check_names, pose
from .revive import specify
from .spec import CHECKPOINT, SPEC, TRACE, Spec

if TYPE_CHECKING:
    from ..data import Federation

PLAN = "plan.toml"  # the runs of a comparison, until each has its folder
SELECT = ("test", "val")
"""Rows that a sweep may choose its settings by: the test rows, or held-out training rows."""
VARIED = ("local_steps", "batch_size")  # options of which a sweep may list several values


class Planned(NamedTuple):
    """One run to do: its settings as plain values, and the live objects that they stand for."""

    spec: Spec
    record: Algorithm
    problem: Problem
    folder: Path | None = None  # where it is kept, with its model; None: nowhere, or in a store

    @property
    def settings(self) -> Settings:
        """The run options."""
        return self.problem.settings


# ---- from what users write to a list of runs ----


def plan(
    fed: Federation,
    model: str | nn.Module,
    records: Sequence[Algorithm],
    seeds: Iterable[int] | None,
    given: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]] = (),
) -> list[Planned]:
    """The runs of a comparison or a sweep, without folders: every record under every seed.

    Runs with the same seed and run options share one problem, and so can be batched.

    Args:
        fed: The federated data.
        model: A name or a module.
        records: The algorithms with their hyper-parameters.
        seeds: The seeds; None: the run option `seed`.
        given: Run options by name; local_steps and batch_size may be lists.
        own: For each record the only values of the listed options that it runs with, by name.
            Empty: every record runs with all of them.

    Returns:
        The runs in this order: by seed, then by the options that are lists, then by record.
    """
    lists = _lists(given)
    planned: list[Planned] = []
    for settings in every_settings(seeds, given):
        here = records
        if own:
            values = settings.values().items()
            here = [r for r, o in zip(records, own, strict=True) if o.items() <= values]
        if not here:
            continue
        problem = pose(fed, model, settings)
        for record in here:
            spec = specify(problem, model, record, len(planned), list(lists))
            planned.append(Planned(spec, record, problem))
    return planned


def every_settings(seeds: Iterable[int] | None, given: Mapping[str, Any]) -> list[Settings]:
    """The run options of a plan: a record for each seed and each combination of listed values.

    Neither data nor a model are needed, so what is wrong is found before anything is loaded.

    Args:
        seeds: The seeds; None: the run option `seed`.
        given: Run options by name; local_steps and batch_size may be lists.

    Raises:
        InputError: A name is unknown, a value is out of its range or listed twice, or there is no
            such device, loss or metric.
    """
    lists = _lists(given)
    found: list[Settings] = []
    for seed in seeds_of(seeds, given):
        for values in itertools.product(*lists.values()):
            varied = dict(zip(lists, values, strict=True))
            settings = settings_of({**given, **varied, "seed": seed})
            check_names(settings)
            found.append(settings)
    # Compared as they are read: 10 and numpy's 10 are the same batch size.
    different = {(one.seed, one.local_steps, one.batch_size) for one in found}
    if len(different) < len(found):
        told = " and ".join(f"{name}={list(values)}" for name, values in lists.items())
        raise InputError(f"{told} must list different values; give several seeds to repeat a run")
    return found


def _lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """The run options that list several values, at least one each."""
    lists = {name: given[name] for name in VARIED if isinstance(given.get(name), list | tuple)}
    if not all(lists.values()):
        raise InputError(f"{' and '.join(lists)} must list at least one value each")
    return lists


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Run options as a record; a hyper-parameter among them is sent to its algorithm.

    Raises:
        InputError: A name is unknown, or a value is out of its range. The message for a
            hyper-parameter shows the record that takes it.
    """
    if "seeds" in given:
        raise InputError(
            "this is one run, with one seed: give seed=..., or call fedsso.compare with seeds=[...]"
        )
    known = {one.name for one in options()}
    # `lr` and other names for a step size, from other libraries, are recognised too.
    hyper = {field.name for cls in ALGORITHMS.values() for field in fields_of(cls)}
    for name in given:
        if name in known:
            continue
        here = name if name in hyper else next(iter(OTHER_NAMES.get(name, ())), None)
        if here in hyper:
            raise InputError(
                f"{name} belongs to the algorithm: give a record such as FedAvg({here}=...), or "
                f'several, such as fedsso.grid("fedavg", {{"{here}": [...]}})'
            )
    return Settings.of(given)


def record_of(algorithm: str | Algorithm) -> Algorithm:
    """The record of a name, with its defaults; a record as it is.

    Raises:
        InputError: The name is unknown, or it is no algorithm at all.
    """
    record = make(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(record, Algorithm):
        raise InputError(
            f"an algorithm must be a name or an object such as FedAvg(alpha=0.01), got {record!r}"
        )
    return record


def records_of(algorithms: Any) -> list[Algorithm]:
    """The records of a comparison: a name stands for the algorithm with its defaults."""
    several = list(algorithms) if isinstance(algorithms, list | tuple) else [algorithms]
    return _different([record_of(one) for one in several])


def grid_of(algorithms: Any) -> list[Algorithm]:
    """The records of a sweep: a name stands for the algorithm's whole grid."""
    several = list(algorithms) if isinstance(algorithms, list | tuple) else [algorithms]
    records: list[Algorithm] = []
    for one in several:
        records += grid(one) if isinstance(one, str) else [record_of(one)]
    return _different(records)


def _different(records: list[Algorithm]) -> list[Algorithm]:
    """The records, if there are some and all differ.

    Two equal records would be one setting with the same seed twice.
    """
    if not records:
        raise InputError("at least one algorithm is needed, got an empty list")
    if len({repr(record) for record in records}) < len(records):
        raise InputError(
            "an algorithm with the same settings was given twice; give several seeds to repeat it"
        )
    return records


def seeds_of(seeds: Iterable[int] | None, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The seeds that were asked for, at least one and all different.

    Args:
        seeds: Several seeds, or None.
        given: The run options; their `seed` is used if `seeds` is None.

    Raises:
        InputError: Both were given, or the seeds are not different integers.
    """
    if isinstance(seeds, str) or not isinstance(seeds, Iterable | None):
        raise InputError(f"seeds must be a list of integers, got seeds={seeds!r}")
    if seeds is None:
        return (given.get("seed", 0),)
    if "seed" in given:
        raise InputError(
            f"seed={given['seed']!r} and seeds were both given; put all seeds into seeds=[...]"
        )
    chosen = tuple(integer("seed", seed) for seed in seeds)
    if not chosen or len(set(chosen)) != len(chosen):
        raise InputError(f"seeds must be different and at least one, got {chosen}")
    return chosen


def folder_of(out: Any) -> Path | None:
    """Where results go; None: nowhere. Of several processes the first alone keeps them.

    Raises:
        InputError: It is no name that a folder can have.
    """
    if out is None:
        return None
    if not isinstance(out, str | Path) or not str(out) or "\0" in str(out):
        raise InputError(f"out must name a folder, got out={out!r}")
    return Path(out) if team().is_first else None


# ---- sweeps ----


class Question(NamedTuple):
    """What a sweep asks: the arguments of `plan`."""

    fed: Federation
    model: str | nn.Module
    records: Sequence[Algorithm]
    seeds: Sequence[int]
    options: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]] = ()


def plan_sweep(question: Question, target: float | None, select: str) -> list[Planned]:
    """The trials of a sweep's grid, checked; nothing is written.

    Args:
        question: What the sweep asks.
        target: The accuracy to reach, or None.
        select: The rows to choose by, "test" or "val".
    """
    planned = plan(*question._replace(fed=judging(question.fed, select)))
    check(planned)
    check_target(target, planned)
    return planned


def judging(fed: Federation, select: str) -> Federation:
    """The federation on whose test rows a grid is judged.

    With "val" these rows are held out of the training rows, so that the real test rows do not
    take part in the choice.

    Raises:
        InputError: There are no such rows.
    """
    check_federation(fed)
    if not len(fed.test_rows):
        raise InputError("there are no test rows to judge by: it takes test_fraction above 0")
    if one_of("choice of rows: select", select, SELECT) == "test":
        return fed
    held_out = fed.validation()
    if not len(held_out.test_rows):
        raise InputError(
            "there are no held-out rows to judge by: it takes clients with three rows at least"
        )
    return held_out


def check_target(target: float | None, planned: Sequence[Planned]) -> None:
    """Refuse a target of a sweep that is no accuracy, or that its trials cannot reach."""
    if target is None:
        return
    if not 0 < number("target", target) <= 1:
        raise InputError(f"target is an accuracy in (0, 1], got target={target!r}")
    check_reachable([target], planned)


def check_reachable(targets: Sequence[float], planned: Sequence[Planned]) -> None:
    """Refuse accuracies that runs cannot reach, because they have none or end before it.

    Args:
        targets: Accuracies in (0, 1].
        planned: The runs that are to reach them.
    """
    if not targets:
        return
    for run in planned:
        if run.problem.loss is mse:
            raise InputError(
                "a target is an accuracy, which the loss mse does not have; leave it out"
            )
        stop = run.settings.stop_at
        if stop is not None and max(targets) > stop:
            raise InputError(
                f"a run that ends at stop_at={stop:g} does not reach the target {max(targets):g}; "
                f"leave stop_at out, or raise it to the target"
            )


# ---- what cannot run is refused ----


def check(planned: Sequence[Planned]) -> None:
    """Refuse what cannot run, before anything is written.

    Raises:
        InputError: The first reason that is found.
    """
    limits()  # a wrong one would be noticed only when the first file is read
    left, reasons = suited(planned)
    for reason in reasons.values():
        raise InputError(reason)
    check_registered([run for run in left if run.folder is not None])


def suited(planned: Sequence[Planned]) -> tuple[list[Planned], dict[str, str]]:
    """The runs whose algorithms can run with their model and cohorts, and why the others cannot.

    Reasons are by the algorithm's name, all of whose runs are then left out. A model or a loss
    that does not fit the data at all is an InputError.
    """
    for problem in {id(run.problem): run.problem for run in planned}.values():
        problem.check()
    reasons: dict[str, str] = {}
    for run in planned:
        try:
            _check_suits(run.record, run.problem)
        except InputError as error:
            reasons.setdefault(run.spec.algorithm, str(error))
    return [run for run in planned if run.spec.algorithm not in reasons], reasons


def _check_suits(record: Algorithm, problem: Problem) -> None:
    """An algorithm must bear these cohorts, this model and this loss, and fit into memory.

    States are made on a device without memory, so that even a Hessian of a huge model can be
    counted.
    """
    settings = problem.settings
    admit(record, settings)
    attendance = attendance_of(problem.fed, settings, problem.module)
    record = fitted(record, problem.module, attendance)
    x = problem.without_memory()
    server = record.server_init(x)
    uplink(record, server, Layout.of(problem.module), settings.compress)
    problem.grants(record.asks())
    clients = problem.fed.clients
    of_client = nbytes(record.client_init(x), 1) + nbytes(record.memory_init(x), 1)
    keeps = nbytes(server, 1) + of_client * clients
    memory = _memory(settings.torch_device)
    if 2 * keeps > memory:  # of the round before and of this one
        instead = "memory='none'" if getattr(record, "memory", "") == "clients" else "fedsso"
        raise InputError(
            f"{type(record).__name__} keeps {keeps / 1e9:.3g} GB at the server and {clients} "
            f"clients, twice within a round; this device has {memory / 1e9:.3g} GB: use "
            f"{instead}, a smaller model or fewer clients"
        )


def _memory(device: torch.device) -> int:
    """Bytes that the device has, of a CPU those of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_registered(planned: Sequence[Planned]) -> None:
    """Refuse to keep runs of an algorithm that is not in the registry.

    Their settings name the algorithm, and nobody could find it by that name when they are read.
    """
    for run in planned:
        if ALGORITHMS.get(run.spec.algorithm) is not type(run.record):
            raise InputError(
                f"{run.spec.algorithm} is not registered, so its run could not be read back; set "
                f"fedsso.algorithms.ALGORITHMS[{run.spec.algorithm!r}] first"
            )


# ---- folders of runs ----


def below(planned: Sequence[Planned], root: Path | None) -> list[Planned]:
    """The same runs, each with a folder of its own below `root`; no root: no folders."""
    if root is None:
        return list(planned)
    return [run._replace(folder=root / run.spec.folder(i)) for i, run in enumerate(planned)]


def prepare(planned: Sequence[Planned], fresh: bool = False) -> None:
    """Write every run's spec, so that whoever is killed knows what is left to do.

    Several specs cannot be written at once. A kill between two of them would lose runs, so all of
    them are first written into one file, plan.toml, which is removed at the end.

    Args:
        planned: The runs. Those without a folder are left alone.
        fresh: Whether a run must not find another one in its folder, not even its own beginning.

    Raises:
        InputError: A folder holds something else, or cannot be written.
    """
    new: dict[Path, Spec] = {}
    for run in planned:
        if run.folder is not None and _is_new(run, run.folder, fresh):
            new[run.folder] = run.spec
    roots = {folder.parent for folder in new}
    if len(new) > 1:
        for root in roots:
            specs = {f.name: spec.to_toml() for f, spec in new.items() if f.parent == root}
            write_atomic(root / PLAN, sealed_toml(specs))
    for folder, spec in new.items():
        check_writable(folder)
        spec.save(folder / SPEC)
    for root in roots:
        (root / PLAN).unlink(missing_ok=True)


def complete_plan(root: Path) -> None:
    """Make the folders of runs that were planned when a process died among them.

    It is the other half of `prepare`: what plan.toml lists and has no folder gets one.
    """
    if not (root / PLAN).is_file():
        return
    with Lock(root):
        for name, table in read_sealed_toml(root / PLAN).items():
            spec = Spec.from_toml(cast(Mapping[str, Any], table))
            # A name with a slash in it would lead out of the folder.
            if Path(name).name == name and not (root / name / SPEC).is_file():
                spec.save(root / name / SPEC)
        (root / PLAN).unlink(missing_ok=True)


def _is_new(run: Planned, folder: Path, fresh: bool) -> bool:
    """Whether a run's folder is still to be made; another run in its place is an error."""
    begun = [name for name in (CHECKPOINT, TRACE) if (folder / name).exists()]
    if begun and not (folder / SPEC).exists():
        raise InputError(
            f"{folder / begun[0]} already exists and belongs to no run; choose another folder"
        )
    if not begun and not checkpoint.exists(folder / CHECKPOINT):
        return True  # a run that never began leaves at most its spec
    if fresh or Spec.load(folder / SPEC).identity != run.spec.identity:
        raise InputError(
            f"{folder} already holds a run; choose another folder (`fedsso resume` completes a run)"
        )
    return False

"""What users call: `simulate`, `sweep`, `compare`, `resume`.

A sweep is a list of planned runs. Runs whose records stack and whose options agree form a group; a
group is cut into chunks of trials that run batched. With `out=` every planned run gets its folder
at once and is completed there chunk by chunk (a single run also every `checkpoint_every` rounds),
so that a killed sweep goes on where it was.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Unpack, cast, overload, runtime_checkable

import torch
from torch import Tensor, nn

from ..algorithm import Algorithm
from ..algorithm.records import signature, stack
from ..algorithms import ALGORITHMS, make
from ..data import Federation
from ..engine import checkpoint
from ..engine.simulate import Simulation, admit, fitted
from ..engine.simulate import run as advance
from ..engine.uplink import uplink
from ..errors import InputError, integer
from ..objective import Layout, ravel
from ..support.files import check_writable, write_atomic
from ..support.intake import Damaged
from ..support.lock import Lock
from ..support.seal import read_sealed_toml, sealed_toml
from ..support.trees import nbytes
from .problem import Context, context
from .results import CHECKPOINT, SPEC, TRACE, Run, Runs, is_done, load_run, run_folders, traces
from .settings import Options, complete, device_of, protocol
from .spec import Spec, specify
from .trace import Trace

log = logging.getLogger("fedsso")
PLAN = "plan.toml"  # the runs of a sweep, until each has its folder
TRIALS = 12  # trials of a chunk on a CPU: 8 to 16 are fastest
MEMORY = {"cpu": 2 << 30, "cuda": 24 << 30}  # bytes of server and client states of a chunk
PACE = (0.25, 5.0)  # seconds between two looks at the traces, at least and at most;
SHARE = 20  # between the two, so many times as long as a look takes

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called as progress(label, round, rounds, numbers) after each round; of batched trials, with the
best's numbers."""
Look = Callable[[Sequence[Spec], Sequence[Trace]], None]
"""Called as look(specs, traces) with what the trials of a chunk have done so far."""


@runtime_checkable
class Watcher(Protocol):
    """A `progress` that is also shown all runs before the first begins, and now and then every
    trial's trace."""

    def __call__(self, label: str, k: int, rounds: int, numbers: dict[str, float]) -> None: ...
    def begin(self, specs: Sequence[Spec]) -> None: ...
    def look(self, specs: Sequence[Spec], traces: Sequence[Trace]) -> None: ...


class Planned(NamedTuple):
    """One run to do."""

    spec: Spec
    record: Algorithm
    context: Context
    options: Mapping[str, Any]
    folder: Path | None


@overload
def simulate(
    fed: Federation, model: str | nn.Module = ..., algorithm: str | Algorithm = ..., *,
    seeds: None = ..., out: str | Path | None = ..., progress: bool | Progress = ..., checkpoint_every: int = ...,
    **options: Unpack[Options],
) -> Run: ...  # fmt: skip
@overload
def simulate(
    fed: Federation, model: str | nn.Module = ..., algorithm: str | Algorithm = ..., *,
    seeds: Iterable[int], out: str | Path | None = ..., progress: bool | Progress = ..., checkpoint_every: int = ...,
    **options: Unpack[Options],
) -> Runs: ...  # fmt: skip
def simulate(
    fed: Federation,
    model: str | nn.Module = "mclr",
    algorithm: str | Algorithm = "fedsso",
    *,
    seeds: Iterable[int] | None = None,
    out: str | Path | None = None,
    progress: bool | Progress = False,
    checkpoint_every: int = 10,
    **options: Unpack[Options],
) -> Run | Runs:
    """Train one model with one algorithm. With `seeds` one run per seed; with `out` a folder that
    can be resumed."""
    integer("checkpoint_every", checkpoint_every, 1)
    if seeds is not None:
        return sweep(fed, model, [algorithm], seeds=seeds, out=out, progress=progress, **options)
    full = complete(options)
    record = _record(algorithm)
    ctx = context(fed, model, full)
    folder = _folder(out)
    planned = Planned(specify(ctx, model, record, full, 0, ()), record, ctx, full, folder)
    check([planned])
    with _locked([folder]):
        prepare([planned], fresh=True)
        return _execute([planned], progress, checkpoint_every)[0]


def sweep(
    fed: Federation,
    model: str | nn.Module = "mclr",
    algorithms: Sequence[str | Algorithm] = ("fedsso",),
    *,
    seeds: Iterable[int] | None = None,
    out: str | Path | None = None,
    progress: bool | Progress = False,
    **options: Any,
) -> Runs:
    """Train with every record of a grid under every seed, trials batched on one device.

    `local_steps` and `batch_size` may be lists. With `out` finished trials are kept and a second
    call goes on.
    """
    root = _folder(out)
    planned = plan(fed, model, algorithms, seeds, options)
    if root is not None:
        planned = [run._replace(folder=root / run.spec.folder(i)) for i, run in enumerate(planned)]
    check(planned)
    with _locked([root]):
        prepare(planned)
        return Runs(_execute(planned, progress, 10))


def plan(
    fed: Federation,
    model: str | nn.Module,
    algorithms: Sequence[str | Algorithm],
    seeds: Iterable[int] | None,
    options: Mapping[str, Any],
) -> list[Planned]:
    """The runs of a sweep, without folders: every record under every seed."""
    records = _records(algorithms)
    vary = [n for n in ("local_steps", "batch_size") if isinstance(options.get(n), (list, tuple))]
    if any(not options[n] for n in vary):
        raise InputError(f"{' and '.join(vary)} must list at least one value each")
    choices = [[{n: v} for v in options[n]] for n in vary]
    planned: list[Planned] = []
    for seed in _seeds(seeds, options):
        for picked in itertools.product(*choices):
            full = complete(
                {**options, **{k: v for one in picked for k, v in one.items()}, "seed": seed}
            )
            ctx = context(fed, model, full)
            for record in records:
                spec = specify(ctx, model, record, full, len(planned), vary)
                planned.append(Planned(spec, record, ctx, full, None))
    return planned


def _record(algorithm: str | Algorithm) -> Algorithm:
    record = make(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(record, Algorithm):
        raise InputError(
            f"an algorithm is a name or a record such as FedAvg(alpha=0.01), got {record!r}"
        )
    return record


def _records(algorithms: Any) -> list[Algorithm]:
    """The records of a sweep, all different."""
    several = list(algorithms) if isinstance(algorithms, list | tuple) else [algorithms]
    records = [_record(a) for a in several]
    if not records:
        raise InputError("a sweep needs at least one algorithm, got an empty list")
    if len({repr(r) for r in records}) < len(records):
        raise InputError(
            "an algorithm with the same settings was given twice; give several seeds to repeat it"
        )
    return records


def _folder(out: Any) -> Path | None:
    """Where results go."""
    if out is None:
        return None
    if not isinstance(out, str | Path) or not str(out) or "\0" in str(out):
        raise InputError(f"out must name a folder, got out={out!r}")
    return Path(out)


def _seeds(seeds: Iterable[int] | None, options: Mapping[str, Any]) -> tuple[int, ...]:
    if isinstance(seeds, str) or not isinstance(seeds, Iterable | None):
        raise InputError(f"seeds must be a list of integers, got seeds={seeds!r}")
    chosen = (
        (options.get("seed", 0),) if seeds is None else tuple(integer("seed", s) for s in seeds)
    )
    if not chosen or len(set(chosen)) != len(chosen):
        raise InputError(f"seeds must be different and at least one, got {chosen}")
    return chosen


def compare(
    fed: Federation,
    model: str | nn.Module = "mclr",
    algorithms: Sequence[str | Algorithm] = ("fedsso", "fedavg", "fedsgd"),
    **options: Any,
) -> Runs:
    """Run several algorithms on one federation with the same cohorts and mini-batches."""
    return sweep(fed, model, algorithms, **options)


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    progress: bool | Progress = False,
) -> Runs:
    """Complete a run, or all runs below a folder; own data and modules have to be given again."""
    complete_plan(Path(folder))
    found = {one: Spec.load(one / SPEC) for one in run_folders(folder)}
    batches: dict[str, list[Path]] = {}  # runs of one context, which go on batched as they began
    for one, spec in found.items():
        batches.setdefault(repr((spec.digest, spec.model, spec.start, spec.options)), []).append(
            one
        )
    unfinished = [
        batch for batch in batches.values() if not all(is_done(one, found[one]) for one in batch)
    ]
    if unfinished:
        with _locked([Path(folder)]):
            _execute(_planned(unfinished, found, federation, model), progress, 10)
    else:
        log.info("%s: every run is finished", folder)
    return Runs([load_run(one) for one in found])


def _planned(
    batches: Sequence[Sequence[Path]],
    specs: Mapping[Path, Spec],
    federation: Federation | None,
    model: nn.Module | None,
) -> list[Planned]:
    """The runs of some folders; those of a batch share one context."""
    planned = []
    data: dict[str, Federation] = {}
    for batch in batches:
        spec = specs[batch[0]]
        live = spec.context(federation or data.get(spec.digest), model)
        data[spec.digest] = live.fed
        planned += [
            Planned(specs[one], specs[one].record, live, specs[one].options, one) for one in batch
        ]
    return planned


@contextmanager
def _locked(folders: Iterable[Path | None]) -> Iterator[None]:
    """Keep other writers out of some folders."""
    with ExitStack() as held:
        for folder in folders:
            if folder is not None:
                held.enter_context(Lock(folder))
        yield


def suits(record: Algorithm, ctx: Context, options: Mapping[str, Any]) -> Algorithm:
    """The record, fitted to the model; an error if it cannot run on it, or not with these cohorts."""
    admit(record, protocol(options))
    record = fitted(record, ctx.module)
    server = record.server_init(_meta(ctx))
    uplink(record, server, Layout.of(ctx.module), options["compress"])
    ctx.grants(record.asks(), options)
    keeps = nbytes(server, 1) + nbytes(record.client_init(_meta(ctx)), 1) * ctx.fed.clients
    memory = _memory(device_of(options["device"]))
    if 2 * keeps > memory:  # of the round before and of this one
        raise InputError(
            f"{type(record).__name__} keeps {keeps / 1e9:.3g} GB at the server and "
            f"{ctx.fed.clients} clients, twice "
            f"within a round; this device has {memory / 1e9:.3g} GB: use fedsso, a smaller model "
            f"or fewer clients"
        )
    return record


def _memory(device: torch.device) -> int:
    """Bytes that the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meta(ctx: Context) -> Tensor:
    """One trial's model without memory."""
    x = ravel(ctx.module)
    return torch.empty(1, len(x), dtype=x.dtype, device="meta")


def check(planned: Sequence[Planned]) -> None:
    """Refuse what cannot run, before anything is written."""
    for run in {id(run.context): run for run in planned}.values():
        run.context.check(run.options)
    for run in planned:
        suits(run.record, run.context, run.options)
        if run.folder is not None:
            _check_registered(run.record, run.spec.algorithm)


def _check_registered(record: Algorithm, name: str) -> None:
    if ALGORITHMS.get(name) is not type(record):
        raise InputError(
            f"{name} is not registered, so its run could not be read back; set "
            f"fedsso.algorithms.ALGORITHMS[{name!r}] first"
        )


def prepare(planned: Sequence[Planned], fresh: bool = False) -> None:
    """Write every run's spec, so that a killed sweep knows what is left to do."""
    new = {
        run.folder: run.spec for run in planned if run.folder is not None and _is_new(run, fresh)
    }
    for root in {folder.parent for folder in new if len(new) > 1}:
        specs = {
            folder.name: spec.to_toml() for folder, spec in new.items() if folder.parent == root
        }
        write_atomic(root / PLAN, sealed_toml(specs))
    for folder, spec in new.items():
        check_writable(folder)
        spec.save(folder / SPEC)
    for root in {folder.parent for folder in new}:
        (root / PLAN).unlink(missing_ok=True)


def complete_plan(root: Path) -> None:
    """Make the folders of runs that were planned when a process died among them."""
    if not (root / PLAN).is_file():
        return
    with Lock(root):
        for name, table in read_sealed_toml(root / PLAN).items():
            spec = Spec.from_toml(cast(Mapping[str, Any], table))
            if Path(name).name == name and not (root / name / SPEC).is_file():
                spec.save(root / name / SPEC)
        (root / PLAN).unlink(missing_ok=True)


def _is_new(run: Planned, fresh: bool) -> bool:
    """Whether a run's folder is still to be made; another run in its place is an error."""
    folder = Path(run.folder or "")
    begun = [name for name in (CHECKPOINT, TRACE) if (folder / name).exists()]
    if begun and not (folder / SPEC).exists():
        raise InputError(
            f"{folder / begun[0]} is there already, and belongs to no run; choose another folder"
        )
    if not begun and not checkpoint.exists(folder / CHECKPOINT):
        return True  # a run that never began leaves at most its spec
    if fresh or Spec.load(folder / SPEC).identity != run.spec.identity:
        raise InputError(
            f"{folder} holds a run already; choose another folder (`fedsso resume` completes a run)"
        )
    return False


def _execute(planned: Sequence[Planned], progress: bool | Progress, every: int) -> list[Run]:
    """Run what is not finished, group by group and chunk by chunk; results in the order of the
    plan."""
    show = _printer if progress is True else progress or None
    look = begin(show, [run.spec for run in planned])
    done: dict[int, Run] = {}
    for i, run in enumerate(planned):
        if run.folder is not None and is_done(run.folder, run.spec):
            done[i] = replace(load_run(run.folder), live=run.context)
            if look is not None:
                look([run.spec], [done[i].trace])
    for chunk in list(chunks(planned, range(len(planned)), done)):
        new = [i for i in chunk if i not in done]
        if not new:
            continue
        with _locked([planned[i].folder for i in new]):
            # trials that are finished run again beside the others: in another batch their sums
            # would round otherwise
            batch = [planned[i] if i in new else planned[i]._replace(folder=None) for i in chunk]
            runs = dict(zip(chunk, run_chunk(batch, show, every, look), strict=True))
        done |= {i: runs[i] for i in new}
    return [done[i] for i in range(len(planned))]


def begin(show: Progress | None, specs: Sequence[Spec]) -> Look | None:
    """Tell a watcher what is to run; what it is to be shown traces with, or None for any other
    callback."""
    if not isinstance(show, Watcher):
        return None
    show.begin(specs)
    return show.look


def chunks(
    planned: Sequence[Planned], todo: Sequence[int], done: Container[int] = ()
) -> Iterator[list[int]]:
    """Indices of runs that are batched together; those of `done` have their place among the others."""
    groups: dict[Any, list[int]] = {}
    for i in todo:
        run = planned[i]
        begun = (
            run.folder is not None and checkpoint.exists(run.folder / CHECKPOINT) and i not in done
        )
        alone = i if begun else None  # a run with a checkpoint of its own goes on from it
        groups.setdefault((id(run.context), signature(run.record), alone), []).append(i)
    for group in groups.values():
        first = planned[group[0]]
        size = _trials(first)
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _trials(run: Planned) -> int:
    """How many trials fit: measured on the state objects of one, without allocating them."""
    device = device_of(run.options["device"]).type
    meta = _meta(run.context)
    record = stack([fitted(run.record, run.context.module)], meta.dtype, meta.device)
    each = (
        nbytes(record.server_init(meta), 1)
        + nbytes(record.client_init(meta), 1) * run.context.fed.clients
    )
    fit = max(1, MEMORY[device] // max(1, each))
    return int(min(TRIALS, fit) if device == "cpu" else fit)


def run_chunk(
    chunk: Sequence[Planned], show: Progress | None, every: int, look: Look | None = None
) -> list[Run]:
    """Run trials batched; if they are too many for the GPU's memory, in two halves."""
    try:
        return _run_batched(chunk, show, every, look)
    except torch.OutOfMemoryError as error:
        if len(chunk) == 1:
            raise InputError(
                f"{chunk[0].spec.label} does not fit into the GPU's memory; use device='cpu', a "
                f"smaller batch_size or "
                "fewer clients in a round"
            ) from error
    log.info("%d trials do not fit into the GPU's memory: half of them at a time", len(chunk))
    torch.cuda.empty_cache()
    half = len(chunk) // 2
    return run_chunk(chunk[:half], show, every, look) + run_chunk(chunk[half:], show, every, look)


def _run_batched(
    chunk: Sequence[Planned], show: Progress | None, every: int, look: Look | None
) -> list[Run]:
    """Run trials batched and write their folders."""
    first = chunk[0]
    specs = [run.spec for run in chunk]
    simulation = Simulation(first.context.job(first.options), [run.record for run in chunk])
    log.info("%s: %d trial(s), %s", specs[0].algorithm, len(chunk), simulation.reason)
    alone = first.folder if len(chunk) == 1 else None
    rounds = first.options["rounds"]
    if alone is not None:
        _go_on(simulation, alone, specs[0].identity, rounds)
    label = (
        specs[0].label
        if len(chunk) == 1
        else f"{specs[0].algorithm}, seed {specs[0].seed}, {len(chunk)} trials"
    )

    def save() -> None:
        if alone is not None:
            checkpoint.save(alone / CHECKPOINT, simulation.state(), specs[0].identity)
            traces(simulation, specs)[0].save(alone / TRACE)

    glance = None if look is None else _Glance(look, simulation, specs)

    def after(_: Simulation) -> None:
        if glance is not None and glance.due():
            glance()
        if show is not None:
            show(label, simulation.k, rounds, _numbers(simulation))
        if simulation.k % every == 0 and simulation.k < rounds:
            save()

    try:
        advance(simulation, rounds, after)
    except KeyboardInterrupt:
        save()
        if glance is not None:
            glance()
        raise
    runs = _finish(simulation, chunk)
    if len(runs) == 1 and (worse := runs[0].trace.worse_than_start()) is not None:
        log.warning("%s: %s", label, worse)
    if look is not None:
        look(specs, [run.trace for run in runs])
    return runs


def _go_on(simulation: Simulation, folder: Path, identity: str, rounds: int) -> None:
    """Take up a run where its folder left it."""
    path = folder / CHECKPOINT
    saved = checkpoint.recover(path, identity) if checkpoint.exists(path) else None
    if saved is None:
        return
    try:
        simulation.restore(saved)
    except Damaged as damage:
        raise InputError(
            f"{path}: {damage}; restore it from a copy, or start again in another folder"
        ) from damage
    if simulation.k > rounds:
        raise InputError(f"{path} counts {simulation.k} rounds of {rounds}; use another folder")


class _Glance:
    """Shows the traces of a chunk under way, so seldom that it hardly costs time."""

    def __init__(self, look: Look, simulation: Simulation, specs: Sequence[Spec]) -> None:
        self.look, self.simulation, self.specs = look, simulation, specs
        self.next = -math.inf

    def due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() >= self.next

    def __call__(self) -> None:
        began = time.monotonic()
        self.look(self.specs, traces(self.simulation, self.specs))
        ended = time.monotonic()
        self.next = ended + min(max(PACE[0], SHARE * (ended - began)), PACE[1])


def _finish(simulation: Simulation, chunk: Sequence[Planned]) -> list[Run]:
    """The finished runs, written to their folders."""
    models = simulation.models().cpu()
    own = models if models.dim() == 3 else None  # [clients, trials, d]
    x = models if own is None else torch.tensordot(simulation.p.to(models.dtype), models, 1)
    buffers = simulation.buffers.cpu()
    runs = []
    for t, trace in enumerate(traces(simulation, [run.spec for run in chunk])):
        personal = None if own is None else own[:, t].clone()
        run = Run(
            chunk[t].spec, trace, x[t].clone(), buffers[t].clone(), chunk[t].context, personal
        )
        folder = chunk[t].folder
        if folder is not None:
            run.save(folder)
        runs.append(run)
    return runs


def _numbers(simulation: Simulation) -> dict[str, float]:
    """The newest numbers of the best trial, for a progress display."""
    row = simulation.rows[-1]
    return {n: float(row[n].nan_to_num(-1.0).max()) for n in ("test_accuracy",) if n in row}


def _printer(label: str, k: int, rounds: int, numbers: dict[str, float]) -> None:
    """A line on standard error that a terminal overwrites; elsewhere one for every tenth of the
    way."""
    shown = "".join(f"  best {n.replace('_', ' ')} {v:.4f}" for n, v in numbers.items())
    text = f"{label}: round {k}/{rounds}{shown}"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}" + "\n" * (k == rounds))
    elif k == rounds or k % -(-rounds // 10) == 0:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()

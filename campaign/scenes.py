"""Work worth interrupting: commands and calls that write a folder, and what completes them."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # typer imports names that click 9 will no longer have
    from fedsso.cli import main as cli

import fedsso
from fedsso.experiment.plan import PLAN
from fedsso.experiment.spec import SPEC
from fedsso.paper import table2 as paper_table2
from fedsso.paper.published import TABLE2 as PUBLISHED
from fedsso.paper.tasks import TABLE2

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, ROUNDS, EVERY = 3, 40, 10  # `resume` writes a checkpoint every 10 rounds as well
DATA = ("--dataset", "digits", "--clients", CLIENTS)
FLOWER_ROUNDS = 6
LATE = (
    *("sklearn.datasets", "pandas", "matplotlib.pyplot", "matplotlib.backends.backend_agg"),
    *("torch._dynamo", "fedsso.flower"),
)
"""What is imported only when it is used."""


def main(*args: object) -> int:
    """The command `fedsso` in this process; its exit code."""
    sys.argv = ["fedsso", *map(str, args)]
    try:
        cli.main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def command(*args: object, fine: tuple[int, ...] = (0,)) -> None:
    """The same; SystemExit unless it ends with a code that is fine."""
    code = main(*args)
    if code not in fine:
        raise SystemExit(code)


@dataclass(frozen=True)
class Scene:
    """Something that writes into a folder."""

    name: str
    begin: Callable[[Path], Any]
    again: Callable[[Path], Any]  # completes it; what either returns belongs to the outcome
    batched: bool = False  # trials that were batched with one that was lost are computed again
    args: Callable[[Path], tuple[object, ...]] | None = None  # the command, to start it anew
    first: Callable[[Path], Any] | None = None  # what is there before, which it replaces


# ---- commands ----


def _run_args(out: Path) -> tuple[object, ...]:
    return ("run", *DATA, "--rounds", ROUNDS, "--checkpoint-every", EVERY, "--out", out)


def _compare_args(out: Path) -> tuple[object, ...]:
    names = "fedsso,fedavg,scaffold"
    return ("compare", *DATA, "--algorithms", names, "--rounds", 6, "--out", out)


def _sweep_args(out: Path, jobs: int = 1) -> tuple[object, ...]:
    grid = (
        "--algorithms",
        "fedavg,fedsgd,fedprox",
        "--alpha",
        "0.1,0.3",
        "--mu",
        "0.1",
        "--target",
        0.5,
    )
    return ("sweep", *DATA, *grid, "--rounds", 4, "--jobs", jobs, "--out", out)


def _resume_or(begin: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """What a user does: resume, or where nothing was begun yet the command again."""

    def again(out: Path) -> Any:
        begun = any(path for form in (SPEC, f"*/{SPEC}", PLAN) for path in out.glob(form))
        return command("resume", out) if begun else begin(out)

    return again


def _by(args: Callable[[Path], tuple[object, ...]]) -> Callable[[Path], Any]:
    return lambda out: command(*args(out))


def _tune_args(out: Path) -> tuple[object, ...]:
    search = ("--algorithms", "fedavg,fedprox", "--trials", 6, "--at-once", 3, "--alpha", "0.01:1")
    return ("tune", *DATA, *search, "--rounds", 4, "--out", out)


@cache
def hospitals() -> tempfile.TemporaryDirectory[str]:
    """A folder with the tables of three hospitals."""
    import csv

    fits = from_tests("", "fits")
    folder = tempfile.TemporaryDirectory(prefix="campaign-")
    for number, name in enumerate(fits.HOSPITALS):
        table = fits.table(number)
        with Path(folder.name, f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([table.names, *table.rows])
    return folder


def _glm_args(out: Path, *more: object) -> tuple[object, ...]:
    files = ("--files", hospitals().name)
    return ("glm", *files, "--outcome", "ill", "--out", out / "model", *more)


def _paper(out: Path) -> None:
    """A quick look at Table 2, with one block, the embedded digits and three rounds."""
    module, name = cast(Any, paper_table2), "mnist-mclr"
    module.TABLE2 = {name: replace(TABLE2[name], data={"name": "digits", "clients": CLIENTS})}
    module.PUBLISHED = {name: PUBLISHED[name]}
    module.QUICK = 3
    command("paper", "table2", "--quick", "--jobs", 1, "--out", out)


# ---- calls ----


def _federation() -> fedsso.Federation:
    return fedsso.load("digits", clients=CLIENTS)


def _simulate(out: Path) -> None:
    fedsso.simulate(_federation(), rounds=ROUNDS, out=out, checkpoint_every=EVERY)


def _resume_or_simulate(out: Path) -> None:
    if (out / SPEC).exists():
        fedsso.resume(out)
    else:
        _simulate(out)


def _sweep(out: Path) -> None:
    records = [fedsso.FedAvg(alpha=a) for a in (0.1, 0.3)] + [fedsso.FedProx(alpha=0.1)]
    fedsso.compare(_federation(), algorithms=records, seeds=(0, 1), rounds=4, out=out)


# ---- Flower ----


def flower_tests() -> Any:
    """The clients that the tests of Flower use: real messages over a wire of real bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_tests("flower", "clients")


def from_tests(folder: str, name: str) -> Any:
    """A module of the tests."""
    place = str(ROOT / "tests" / folder)
    if place not in sys.path:
        sys.path.insert(0, place)
    return import_module(name)


def flower(out: Path, rounds: int = FLOWER_ROUNDS) -> list[list[float]]:
    """A federation of three clients with checkpoints; the model that it ends with."""
    clients = flower_tests()
    from fedsso.flower import FedSSO

    strategy = FedSSO(
        eta_l=clients.ALPHA, local_steps=clients.STEPS, min_available_nodes=3, checkpoint_dir=out
    )
    initial = strategy.resume() or clients.initial()
    left = strategy.rounds_left(rounds)
    result = strategy.start(grid=clients.federation(), initial_arrays=initial, num_rounds=left)
    return [array.numpy().ravel().tolist() for array in result.arrays.values()]


_smaller = _by(lambda out: _glm_args(out, "--ignore", "smoker"))
SCENES = {
    scene.name: scene
    for scene in (
        Scene("run", _by(_run_args), _resume_or(_by(_run_args)), args=_run_args),
        Scene("compare", _by(_compare_args), _resume_or(_by(_compare_args)), batched=True),
        Scene("sweep", _by(_sweep_args), _by(_sweep_args)),
        Scene("paper", _paper, _paper),
        Scene("simulate", _simulate, _resume_or_simulate),
        Scene("python sweep", _sweep, _sweep, batched=True),
        Scene("flower", flower, flower),
        Scene("tune", _by(_tune_args), _by(_tune_args), batched=True),
        Scene("glm", _by(_glm_args), _by(_glm_args)),
        Scene("glm over a model", _smaller, _smaller, first=_by(_glm_args)),
    )
}
JOBS = replace(SCENES["sweep"], name="sweep --jobs 2", args=lambda out: _sweep_args(out, 2))


def preload() -> None:
    """Import once what every case would import for itself."""
    for name in LATE:
        import_module(name)
    flower_tests()

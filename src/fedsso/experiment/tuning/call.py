"""What users call: `tune`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...algorithm.records import fields_of
from ...algorithms import ALGORITHMS
from ...engine.ranks import team
from ...engine.settings import with_options
from ...errors import InputError, integer, one_of
from ...support.claims import Claims
from ...support.files import check_writable
from ...support.lock import Lock
from .. import sweep
from ..execute import Progress, printer
from ..folders import SWEEP, check_kind, forget_other
from ..grids import axes
from ..plan import VARIED, Question, every_settings, folder_of, judging, plan_sweep, seeds_of
from ..results import Results
from ..store import PARTS, put_aside_damaged
from ..sweep import SHARED, deadline_of, kept_in, purpose_of
from ..workers import OutOfTime
from . import AT_ONCE, PRUNERS
from .search import Means, Search, load_optuna
from .space import Space, space_of

if TYPE_CHECKING:
    from ...data import Federation

EXAMPLE = '{"alpha": "0.001:1"}'


@with_options
def tune(
    fed: Federation,
    model: str | nn.Module = "mclr",
    algorithms: str | Sequence[str] = ("fedsso",),
    *,
    space: Mapping[str, Any] | None = None,
    trials: int = 24,
    at_once: int = AT_ONCE,
    prune: str = "halving",
    seeds: Iterable[int] | None = None,
    target: float | None = None,
    select: str = "test",
    out: str | Path | None = None,
    minutes: float | None = None,
    progress: bool | Progress = False,
    **options: Any,
) -> Results:
    """Search adaptively for the best setting of each algorithm, with fewer trials than a grid.

    Each batch of settings is drawn where those before it fared well, by Optuna's sampler TPE.
    Settings that fall behind while they train are dropped. "Best" means what it means for
    `fedsso.sweep`. It needs Optuna: `pip install '.[tune]'` in a checkout.

    Args:
        fed: The data and which client holds them. It needs test rows.
        model: A name or your own `nn.Module`.
        algorithms: Names of algorithms. Each is searched by itself.
        space: What is searched, by field, for every algorithm that has it: a range as text,
            "0.001:1", or as a pair of numbers; a list of choices; or one value, which is then
            fixed. Left out: between the ends of the algorithm's grid, on a logarithmic scale.
        trials: Settings that are tried for each algorithm, the dropped ones among them.
        at_once: Settings that are asked for and trained together. More are faster, fewer learn
            sooner from each other.
        prune: When a setting is dropped, after a quarter and after half of the rounds:
            "halving", if it is not in the better half of those that came so far; "median", if it
            is worse than the median of those that were finished; or "none", never.
        seeds: Every setting runs once for each of these, and its mean counts.
        target: The accuracy to reach in few rounds.
        select: The rows to choose by, as for `fedsso.sweep`.
        out: A folder that is kept, as for `fedsso.sweep`. The same call goes on after a kill, and
            the same call on other machines takes part. A larger number of `trials` adds to it.
        minutes: Stop after this time with OutOfTime; with `out` the same call goes on.
        progress: As for `fedsso.sweep`.

    Returns:
        All runs, without models, as those of a sweep. A run that was dropped is there as a run of
        the rounds that it has.

    Raises:
        InputError: As for `fedsso.sweep`; also if Optuna is not installed, or a range is none.
        OutOfTime: `minutes` are over and work is left.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> found = fedsso.tune(fed, "mclr", "fedavg", trials=8, rounds=8, space={"alpha": "0.001:1"})
    >>> len(found.settings()), found.best().final() > 0.8
    (8, True)
    """
    load_optuna()
    names = [algorithms] if isinstance(algorithms, str) else list(algorithms)
    root = folder_of(out)
    check_kind(root, SWEEP)
    chosen = seeds_of(seeds, options)
    options.pop("seed", None)  # it is among the chosen seeds
    every_settings(chosen, options)
    spaces = [space_of(name, fields) for name, fields in _by_algorithm(names, space).items()]
    question = Question(fed, model, _corners(spaces), chosen, options)
    planned = plan_sweep(question, target, select)
    purpose = f"tune {purpose_of(planned, target, select)}"
    limit = deadline_of(minutes)
    with kept_in(root) as folder, Lock(folder, purpose):
        means = Means(folder, folder / PARTS, trials, at_once, prune, limit, printer(progress))
        try:
            results = search_all(question, spaces, target, select, means)
        except OutOfTime as late:
            how = "call it again to go on" if root else "give it more minutes, or out= to keep it"
            raise OutOfTime(f"{late}; {how}") from None
        if root is not None:
            # The room `report` imports this one, so it can only be imported when it is needed.
            from ...report.sweeps import trials_csv, write

            forget_other(root, trials_csv(results))
            write(root, results)
        return results


def _by_algorithm(names: Sequence[str], space: Any) -> dict[str, dict[str, Any]]:
    """The fields of the space that each algorithm has.

    Raises:
        InputError: A field belongs to none of them, or an algorithm is no name.
    """
    if not names or len(set(map(repr, names))) < len(names):
        raise InputError(f"algorithms must be different names, at least one; got {names}")
    given = {} if space is None else space
    if not isinstance(given, Mapping):
        raise InputError(f"space must be a dictionary such as {EXAMPLE}, got {space!r}")
    found: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    for name in names:
        axes(name)  # which refuses what is no name of an algorithm
        own = {field.name for field in fields_of(ALGORITHMS[name])}
        known |= own
        found[name] = {key: value for key, value in given.items() if key in own}
    for key in given:
        if key not in known:
            raise InputError(
                f"{key} is no field of {' or '.join(names)}; choose from {', '.join(sorted(known))}"
            )
    return found


def _corners(spaces: Sequence[Space]) -> list[Any]:
    """Records at the ends of all spaces."""
    found: list[Any] = []
    for space in spaces:
        found += space.corners()
    return found


def search_all(
    question: Question,
    spaces: Sequence[Space],
    target: float | None,
    select: str,
    means: Means,
) -> Results:
    """Search one algorithm after the other, and choose the best setting of each.

    The command line calls it too. The caller holds the lock of the folder.

    Args:
        question: What is asked, with the whole federation. Its records do not count.
        spaces: What is searched.
        target: The accuracy to reach, or None.
        select: The rows to choose by, "test" or "val".
        means: How it is carried out.

    Raises:
        InputError: An argument is wrong, the folder cannot be written, or torchrun has started
            several processes.
        OutOfTime: The deadline has passed and work is left.
    """
    integer("trials", means.trials, 1)
    integer("at_once", means.at_once, 1)
    one_of("rule for dropping: prune", means.prune, PRUNERS)
    if team().size > 1:
        raise InputError(
            "tune does not run under torchrun; start the same command several times with one "
            "folder, on one machine or on several"
        )
    for name in VARIED:
        if isinstance(question.options.get(name), list | tuple):
            raise InputError(f"{name} must be one value here; tune searches fields of algorithms")
    judged = question._replace(fed=judging(question.fed, select))
    with Lock(means.parts, SHARED), Claims(means.parts) as claims:
        check_writable(means.parts)
        put_aside_damaged(means.parts)
        runs = []
        for space in spaces:
            runs += Search(judged, space, target, select, means, claims).run()
    results = Results(runs, target=target)
    if select == "test":
        return results
    last = sweep.Means(means.parts, 1, means.deadline, means.progress)
    chosen = {name: best.record for name, best in results.winners().items()}
    return sweep.judge_chosen(question, results, last, chosen)

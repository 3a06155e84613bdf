"""The search: asks Optuna for settings, trains them stacked, tells how they fared.

What Optuna knows is in a journal in the folder of the search, to which any number of processes, on
any number of machines, may add. One process at a time asks for a batch, under a claim. It trains
the batch under claims of its own, so that others see whether it lives. Settings of a killed process
are asked for again, by whoever comes next.

What is asked follows from the seed and the journal alone: every batch has a sampler of its own,
seeded by the number of settings before it. So a search that was killed while it trained goes on as
if nothing had happened; one that was killed while it asked may draw other settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InputError
from ...support.claims import BEATS, Claims
from ..execute import Counter, Progress, Standing
from ..plan import Planned, Question, plan
from ..results import Setting
from ..run import Run
from ..store import held, read, save_part, spec_of
from ..trace import LOSS
from ..workers import OutOfTime
from . import AT_ONCE
from .batch import train
from .journal import Journal
from .space import Space

if TYPE_CHECKING:
    import optuna

    from ...algorithm import Algorithm

JOURNAL = "tune.journal"  # what Optuna knows, in the folder of the search
RUNS = "runs"  # where the journal says which runs belong to a setting
BATCH = "batch"  # and with which others it was trained
ASK = "ask"
FIRST_RUNG = 4  # settings are first compared after a quarter of the rounds
HALVING = 2  # and again whenever the rounds have doubled
WORST = -1e300  # of a setting whose loss is no number


def load_optuna() -> Any:
    """The package Optuna, which is an extra.

    Raises:
        InputError: It is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise InputError(
            f"tuning needs Optuna ({error}); install fedsso with its extra, in a checkout "
            "`pip install '.[tune]'`"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Means(NamedTuple):
    """How a search is carried out."""

    root: Path  # folder of the journal
    parts: Path  # folder of the traces
    trials: int  # settings that are tried for each algorithm
    at_once: int = AT_ONCE  # of them, how many are asked for and trained together
    prune: str = "halving"
    deadline: float = math.inf  # of time.monotonic(): no new batch begins after it
    progress: Progress | None = None


class Count(NamedTuple):
    """How many settings the journal has."""

    finished: int
    open: int


class Asked(NamedTuple):
    """A setting to try."""

    trial: optuna.Trial
    runs: list[Planned]  # one for each seed


class Search:
    """The search for the best setting of one algorithm.

    Args:
        question: What is asked: the rows that judge, the model, the seeds and the run options. Its
            records do not count.
        space: What is searched.
        target: The accuracy to reach, or None.
        judged_by: "test", or "val" for held-out rows.
        means: How it is carried out.
        claims: Those of this process, in the folder of the traces.
    """

    def __init__(
        self,
        question: Question,
        space: Space,
        target: float | None,
        judged_by: str,
        means: Means,
        claims: Claims,
    ) -> None:
        self.optuna = load_optuna()
        # Raised where this process was taken for dead, and another one has finished its setting.
        self.taken_over = self.optuna.exceptions.UpdateFinishedTrialError
        self.question = question
        self.space = space
        self.target = target
        self.judged_by = judged_by
        self.means = means
        self.claims = claims
        self.pause = min(1.0, claims.patience / BEATS)  # seconds between two looks at the journal
        self.planned = plan(*question._replace(records=space.corners()))
        self.rounds = self.planned[0].settings.rounds
        self.name = f"{space.algorithm}-{self._digest()}"
        with _readable(means.root / JOURNAL):
            journal = Journal(means.root / JOURNAL, claims)
            self.study = self.optuna.create_study(
                storage=self.optuna.storages.JournalStorage(journal),
                study_name=self.name,
                load_if_exists=True,
                direction="maximize",
                pruner=self._pruner(),
            )

    def _digest(self) -> str:
        """A digest of everything that decides how a setting fares."""
        parts = [run.spec.identity for run in self.planned]
        parts.append(json.dumps(self.space.table(), default=str))
        parts.append(repr(self.target))
        parts.append(self.judged_by)
        text = " ".join(parts)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _pruner(self) -> Any:
        """Optuna's rule by which settings are dropped."""
        pruners = self.optuna.pruners
        if self.means.prune == "none":
            return pruners.NopPruner()
        if self.means.prune == "median":
            return pruners.MedianPruner(n_startup_trials=self.means.at_once)
        least = next(iter(self._rungs()), 1)
        return pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=HALVING)

    def _rungs(self) -> list[int]:
        """The rounds after which settings are compared; each of them is evaluated."""
        found: dict[int, None] = {}
        every = self.planned[0].settings.eval_every
        rung = max(1, self.rounds // FIRST_RUNG)
        while rung < self.rounds:
            evaluated = math.ceil(rung / every) * every
            if evaluated < self.rounds:
                found[evaluated] = None
            rung *= HALVING
        return list(found)

    # ---- the loop ----

    def run(self) -> list[Run]:
        """Try settings until there are enough, here and elsewhere; what was tried is returned.

        Raises:
            OutOfTime: The deadline has passed and settings are left to try.
        """
        while True:
            count = self._count()
            if count.finished >= self.means.trials and not count.open:
                self._tidy()
                return self._collect()
            if time.monotonic() >= self.means.deadline:
                left = max(0, self.means.trials - count.finished)
                raise OutOfTime(f"{left} of {self.means.trials} trials are left")
            batch = self._ask()
            if batch:
                self._try(batch)
            else:
                label = f"{self.space.algorithm}, others are at the rest"
                self._tell(count.finished, label, 0)
                time.sleep(self.pause)

    def _trials(self) -> list[Any]:
        """All settings of the journal but those that were given up."""
        with _readable(self.means.root / JOURNAL):
            every = self.study.get_trials(deepcopy=False)
        return [one for one in every if one.state != self.optuna.trial.TrialState.FAIL]

    def _count(self) -> Count:
        """How many settings are finished, and how many somebody is at.

        One that waits to be asked for again is neither.
        """
        states = [one.state for one in self._trials()]
        running = states.count(self.optuna.trial.TrialState.RUNNING)
        return Count(sum(state.is_finished() for state in states), running)

    # ---- asking ----

    def _ask(self) -> list[Asked]:
        """A batch of settings that nobody has tried; none if somebody else asks, or all are asked.

        One process asks at a time, so that there are not more settings than were wished for.
        """
        turn = f"{self.name}-{ASK}"
        if not self.claims.take(turn):
            return []
        try:
            self._ask_again_for_the_dead()
            trials = self._trials()
            waits = self.optuna.trial.TrialState.WAITING
            asked = sum(one.state != waits for one in trials)
            self.study.sampler = self.optuna.samplers.TPESampler(
                # Those that wait count as well: else the first of them would be drawn twice.
                seed=self._seed(len(trials)),
                n_startup_trials=self.means.at_once,
                multivariate=True,
                constant_liar=True,
            )
            count = min(self.means.at_once, self.means.trials - asked)
            return [self._one() for _ in range(count)]
        finally:
            self.claims.give_back(turn)

    def _seed(self, asked: int) -> int:
        """The seed of the sampler of a batch, by how many settings came before it."""
        seed = self.question.seeds[0]
        text = f"{self.name} {seed} {asked}"
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:4])

    def _one(self) -> Asked:
        """One more setting, claimed."""
        trial = self.study.ask()
        self.claims.take(self._claim(trial.number))
        return self._asked(trial, self.space.draw(trial))

    def _asked(self, trial: Any, record: Algorithm) -> Asked:
        """A setting with its runs."""
        planned = plan(*self.question._replace(records=[record]))
        number = trial.number * len(planned)
        runs = []
        for run in planned:
            spec = replace(run.spec, trial=number)
            runs.append(run._replace(spec=spec))
            number += 1
        return Asked(trial, runs)

    def _claim(self, number: int) -> str:
        """What a setting is called in claims."""
        return f"{self.name}-{number}"

    def _ask_again_for_the_dead(self) -> None:
        """Give up the settings of processes that are dead, and have them asked for again."""
        state = self.optuna.trial.TrialState
        for one in self._trials():
            if one.state != state.RUNNING or not self.claims.take(self._claim(one.number)):
                continue
            now = self.study.get_trials(deepcopy=False)[one.number]
            if now.state == state.RUNNING:
                # First given up, then asked for: a kill in between costs a setting, not a place.
                self.study.tell(now.number, state=state.FAIL)
                params = now.system_attrs.get("fixed_params") or now.params
                if len(params) == self.space.size:
                    self.study.enqueue_trial(params)
            self.claims.give_back(self._claim(one.number))

    # ---- trying ----

    def _try(self, batch: Sequence[Asked]) -> None:
        """Train a batch, keep the traces, and tell Optuna how the settings fared."""
        there = held(self.means.parts)
        found: dict[int, list[Run]] = {}
        new: list[int] = []
        for i, one in enumerate(batch):
            specs = [run.spec for run in one.runs]
            names = [spec.identity for spec in specs]
            if all(name in there for name in names):
                kept = [there[name] for name in names]
                found[i] = read(kept, specs)
            else:
                new.append(i)
        found |= self._train(batch, new, self._falls_behind)
        for i, one in enumerate(batch):
            with suppress(self.taken_over):
                one.trial.set_user_attr(BATCH, batch[0].trial.number)
                self._close(one, found[i])
            self.claims.give_back(self._claim(one.trial.number))

    def _close(self, asked: Asked, runs: Sequence[Run]) -> None:
        """Tell Optuna which runs a setting has, and how it fared."""
        asked.trial.set_user_attr(RUNS, [run.spec.identity for run in runs])
        if runs[0].spec.options["rounds"] == self.rounds:
            self.study.tell(asked.trial, self._score(runs))
        else:
            self.study.tell(asked.trial, state=self.optuna.trial.TrialState.PRUNED)

    def _falls_behind(self, asked: Asked, value: float, rung: int) -> bool:
        """Whether a setting with this value at a rung is dropped."""
        try:
            asked.trial.report(value, rung)
        except self.taken_over:
            return True
        return bool(asked.trial.should_prune())

    def _run_again(self, lost: Sequence[Any]) -> None:
        """Train settings again whose traces are damaged or gone, in their batches as before."""
        batches: dict[int, list[Asked]] = {}
        for one in lost:
            record = self.space.draw(self.optuna.trial.FixedTrial(one.params))
            own = batches.setdefault(one.user_attrs.get(BATCH, one.number), [])
            own.append(self._asked(one, record))
        pruned = self.optuna.trial.TrialState.PRUNED
        fell = {one.number: one.last_step for one in lost if one.state == pruned}

        def fell_behind(asked: Asked, _: float, rung: int) -> bool:
            return fell.get(asked.trial.number) == rung

        for batch in batches.values():
            self._train(batch, range(len(batch)), fell_behind)

    def _train(
        self,
        batch: Sequence[Asked],
        new: Sequence[int],
        falls_behind: Callable[[Asked, float, int], bool],
    ) -> dict[int, list[Run]]:
        """Train some settings of a batch; those that fall behind are dropped on the way.

        Returns:
            The runs of each setting, by its place in the batch.
        """
        if not new:
            return {}
        planned = _in_one_problem_each([(i, batch[i].runs) for i in new])
        settings = [setting for setting, _ in planned]

        def compare(rung: int, values: dict[int, float]) -> Collection[int]:
            pairs = values.items()
            return [i for i, value in pairs if falls_behind(batch[i], value, rung)]

        def show(label: str, k: int, _: int, numbers: dict[str, float]) -> None:
            self._tell(self._done, label, k, numbers)

        self._done = self._count().finished
        trained = train(
            [run for _, run in planned],
            settings,
            self._rungs(),
            compare,
            show,
        )
        runs = [replace(run, judged_by=self.judged_by) for run in trained]
        save_part(self.means.parts, runs)
        found: dict[int, list[Run]] = {}
        for setting, run in zip(settings, runs, strict=True):
            own = found.setdefault(setting, [])
            own.append(run)
        return found

    def _score(self, runs: Sequence[Run]) -> float:
        """How well a setting fared, as one number; larger is better.

        It orders settings as `Results.best` does. Those that reach the target with every seed have
        more than 1, the more the fewer rounds they need. The others have their final accuracy.
        """
        setting = Setting("", tuple(runs))
        if not any(run.trace.has_accuracy for run in runs):
            loss = setting.final(LOSS)
            return -loss if math.isfinite(loss) else WORST
        if self.target is not None:
            needed = setting.mean_rounds(self.target)
            if math.isfinite(needed):
                return 2 - needed / (self.rounds + 1)
        final = setting.final()
        return final if math.isfinite(final) else 0.0

    # ---- what came of it ----

    def _tidy(self) -> None:
        """Remove the claims that killed processes have left on settings, when all are finished."""
        every = self.study.get_trials(deepcopy=False)
        self.claims.forget([self._claim(one.number) for one in every])

    def _collect(self) -> list[Run]:
        """The runs of all settings, in the order in which they were asked for, each once."""
        finished = [one for one in self._trials() if one.state.is_finished()]
        there = held(self.means.parts)
        self._run_again([one for one in finished if not there.keys() >= set(one.user_attrs[RUNS])])
        there = held(self.means.parts)
        wanted: dict[str, None] = {}
        for one in finished:
            wanted |= dict.fromkeys(one.user_attrs[RUNS])
        gone = sum(identity not in there for identity in wanted)
        if gone:
            raise InputError(
                f"the traces of {gone} runs that {self.means.root / JOURNAL} lists are gone; tune "
                f"again in another folder"
            )
        kept = [there[identity] for identity in wanted]
        return read(kept, [spec_of(one) for one in kept])

    def _tell(
        self,
        done: int,
        label: str,
        k: int,
        numbers: dict[str, float] | None = None,
    ) -> None:
        """Tell the progress how far the search is."""
        show = self.means.progress
        if show is None:
            return
        trials = self.means.trials
        if isinstance(show, Counter):
            phase = f"tune {self.space.algorithm}"
            share = min(1.0, done / trials)
            now = Standing(
                phase=phase,
                done=done,
                trials=trials,
                label=label,
                k=k,
                rounds=self.rounds,
                share=share,
            )
            show.count(now, numbers or {})
        elif numbers is not None:
            show(f"{done} of {trials} trials done: {label}", k, self.rounds, numbers)


def _in_one_problem_each(
    asked: Sequence[tuple[int, Sequence[Planned]]],
) -> list[tuple[int, Planned]]:
    """The runs of several settings, those of one seed with one problem, so that they stack."""
    first = asked[0][1]
    found = []
    for setting, runs in asked:
        for run, like in zip(runs, first, strict=True):
            stacked = run._replace(problem=like.problem)
            found.append((setting, stacked))
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What cannot be read of a journal becomes a sentence."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise InputError(
            f"{path} is damaged: it is not a whole journal of Optuna ({error}); restore it from a "
            f"copy, or tune in another folder"
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot use {path}: {error.strerror or error}; tune in another folder"
        ) from error

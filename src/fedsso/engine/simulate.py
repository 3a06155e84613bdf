"""The simulator: clients and hyper-parameter trials as leading axes, in chunks that fit a budget.

One `Trials` object runs the trials of one group (records that stack) under one seed.

The life of round k:

    1. `rounds.plan(k)` says who is chosen, who of them answers and after how many local steps.
    2. For each exchange (phase) of the algorithm: the server's message goes to all who are
       chosen; those who answer work in chunks; their uploads are counted as they are sent, then
       decoded and averaged with the weights p_i / sum of the p_i of those who answer; the server
       makes its next state of the mean.
    3. Each trial is judged by its new model and the loss of the round. A trial that exploded is
       taken back by its algorithm or has diverged; its neighbours go on.
    4. In every `eval_every`-th round, and in the last, the new models are evaluated.
    5. The new state and the row of the trace replace the old ones in one step.

Server states have leaves [trials, ...]. What clients receive, keep and send has leaves
[clients, trials, ...], where the clients are those of one chunk. A chunk holds as many clients as
the memory budget of `gather.py` allows: a whole cohort of large models would not fit, and a chunk
of clients of similar size needs little padding.

The state is one immutable value (`state.py`), and `round()` replaces it at once. Until then a
round works on copies, so that an interrupt loses the round and nothing else. Two buffers are
written in place and named so: the gather buffers of `gather.py`, and the curvature store of
FedSSO.

Nothing here draws random numbers. All draws come from `rounds.py`, as functions of the seed.

Several processes may run the same trials together (`ranks.py`). Each computes some of those who
answer; what follows from the uploads is summed up over all of them, and the server's step is the
same on each. Where there is one process, nothing is added.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithm.contract import FORGOTTEN, Algorithm, Attendance, Cohort, Reply
from ..algorithm.records import stack
from ..errors import InputError
from ..objective.backend import Layout, buffers_of, ravel
from ..objective.choose import objective
from ..objective.dense import is_linear
from ..support.intake import Damaged
from ..support.trees import Scalar, Tree, leaves, named_leaves, tree_map
from .checkpoint import Reader, of_text
from .crew import Crew, Desk
from .dealing import Dealing
from .evaluate import Evaluator
from .gather import BUDGET, Chunk, gathering
from .halting import Halting
from .ledger import Ledger
from .per_client import Absence, PerClient
from .ranks import Spent, Team
from .ranks import team as team_of_ranks
from .rounds import Ints, Rounds
from .state import BY_CLIENT, KEPT, State, choose, gathered
from .threads import one_thread_for_small_models, plain_convolutions
from .uplink import part_of, uplink

if TYPE_CHECKING:
    from ..algorithm.contract import Phase
    from ..data import Federation
    from ..objective.losses import RowLoss
    from .evaluate import Prepare, Rows
    from .metrics import Metric
    from .rounds import Plan
    from .settings import Settings

log = logging.getLogger("fedsso")
SMALL = 1e-6  # the least that counts as a first loss: a run may start at the optimum
MIN_CHUNK = 8  # clients, however ragged
SIMILAR = 0.8  # on a CPU, clients of a chunk have at least this share of the largest one's rows
A = TypeVar("A", bound=Algorithm)


@dataclass(frozen=True)
class Job:
    """Everything about a run but its algorithm.

    The trials of one `Trials` object share it. The settings hold one seed, so that all trials see
    the same cohorts and mini-batches.
    """

    fed: Federation
    module: nn.Module  # the initial model
    loss: RowLoss
    metrics: dict[str, Metric]
    settings: Settings


def fitted(
    record: A,
    model: nn.Module | Layout,
    attendance: Attendance = Attendance(),  # noqa: B008
) -> A:
    """The record for this model and federation.

    Args:
        record: An algorithm's record, with plain numbers or stacked.
        model: A module, or the layout of its parameters in the flat vector.
        attendance: How many clients there are, and whether some may be missing.

    Returns:
        What `record.fit` and then `record.join` make of it. `fit` is given one number of
        parameters for each layer and the shape of each parameter, both in the order of the flat
        vector. The parameters of one submodule (a weight and its bias) count as one layer.
    """
    layout = model if isinstance(model, Layout) else Layout.of(model)
    record = record.fit(layout.layers, [tuple(shape) for shape in layout.shapes])
    return record.join(attendance, sum(layout.sizes))


def attendance_of(fed: Federation, settings: Settings, module: nn.Module) -> Attendance:
    """Who takes part in a run of these settings, and with what."""
    rows = int(fed.train_sizes.max())
    return Attendance(
        fed.clients,
        settings.some_absent,
        settings.compress is not None,
        rows,
        tuple(fed.sample_shape),
        settings.l2,
        exact=is_linear(module, fed.sample_shape) and _is_exact(settings, rows),
        share=settings.asked(fed.clients) / fed.clients,
    )


def _is_exact(settings: Settings, rows: int) -> bool:
    """Whether what clients send in a round is the gradient of the mean loss, up to its scale.

    That is so if all of them answer, uncompressed, with one plain step over all their rows, of
    which nobody has more than `rows`. It is not said of a loss of the user's own: whoever is told
    takes long steps, which are safe with losses of bounded curvature.
    """
    full = settings.batch_size is None or settings.batch_size >= rows
    one = settings.local_steps == 1 or (full and settings.local_epochs == 1)
    known = settings.loss is None or isinstance(settings.loss, str)
    plain = settings.optimizer.is_plain and settings.compress is None
    return full and one and known and plain and not settings.some_absent


def admit(record: Algorithm, settings: Settings) -> None:
    """Refuse an algorithm that these settings do not suit.

    Raises:
        InputError: The record says `needs_all`, and the settings choose only some clients or let
            some drop out. Or it does not say `any_client`, and clients are to do other work than
            plain SGD. The message names a remedy.
    """
    if not settings.optimizer.is_plain:
        _admit_optimizer(record, settings)
    if record.needs_all and settings.some_absent:
        raise InputError(
            f"{type(record).__name__} needs all clients in every round, got "
            f"participation={settings.participation:g}, drop_rate={settings.drop_rate:g}; use "
            f"participation=1 and drop_rate=0, or {record.needs_all}"
        )


def _admit_optimizer(record: Algorithm, settings: Settings) -> None:
    """Refuse an algorithm whose formulas hold for plain SGD alone."""
    name = type(record).__name__
    given = f"client={settings.client!r}, client_weight_decay={settings.client_weight_decay:g}"
    if not record.any_client:
        raise InputError(
            f"{name} prescribes what its clients do, got {given}; use client='sgd' and "
            f"client_weight_decay=0, or FedAvg, FedAvgM, FedAdam or FedSSO"
        )
    if settings.optimizer.is_adam and getattr(record, "alpha", 0) == "auto":
        raise InputError(
            f"alpha='auto' chooses the step of SGD, got {given}; give Adam's own step, as in "
            f"{name}(alpha=0.001)"
        )


class Share(NamedTuple):
    """A chunk of the clients that answer."""

    part: Ints  # their places among those who answer
    clients: Ints  # their numbers in the federation
    ids: list[int]  # the same as a list
    weight: Tensor  # of each in the mean, in the run's type and on its device


class Answering(NamedTuple):
    """Those who answer in a round, chunk by chunk. The same plan gives the same object."""

    plan: Plan | None
    who: Ints
    weight: Tensor  # of each in the mean; they sum to 1
    mass: float  # their share of all clients' weights
    shares: list[Share]  # of those that this process computes
    lender: int | None  # a process with clients, where another one has none


class Trials:
    """Trials of one algorithm on one federation, advanced round by round.

    Args:
        job: Data, initial model, loss, metrics and settings. The module gives the start and is
            not trained itself.
        records: One record for each trial. They must stack: one type, equal static fields.
        team: The processes that run these trials together; left out: those that torchrun has
            started, or this one alone. All of them make the same object and the same calls.

    `now` is the state after k rounds. `rows` has k + 1 entries: row 0 evaluates the initial
    model, row i describes round i. A row maps the names of columns to float64 tensors [trials].

    Callers advance it by `run`, which switches autograd off and chooses the number of threads.
    """

    def __init__(self, job: Job, records: Sequence[Algorithm], team: Team | None = None) -> None:
        self.team = team or team_of_ranks()
        settings = job.settings
        for record in records:
            admit(record, settings)
        self.job = job
        self.settings = settings
        self.trials = len(records)
        self.device = settings.torch_device
        self.dtype = settings.torch_dtype
        self.fed = job.fed.to(self.device)
        self.p = job.fed.p.cpu()
        module = job.module.to(self.device, self.dtype)
        shape = job.fed.sample_shape
        self.f, self.reason = objective(
            module, job.loss, settings.engine, self.device, shape, job.fed.is_sparse
        )
        self.f.l2 = settings.l2
        attendance = attendance_of(job.fed, settings, module)
        each = [fitted(record, module, attendance) for record in records]
        self.algorithm = stack(each, self.dtype, self.device)
        self.rounds = Rounds(job.fed, settings)
        another = partial(gathering, self.fed, self.dtype)
        self.gather = another()
        self.crew = Crew(Desk(self.f, self.gather), another, each[0], self.device)
        pieces = gathering(self.fed, self.dtype)
        self.evaluator = Evaluator(self.f, self.fed, pieces, job.metrics, self.team)
        self.now = self._begin(module)
        self._initial = {name: getattr(self.now, name) for name in BY_CLIENT}
        self.uplink = uplink(self.algorithm, self.server, self.f.layout, settings.compress)
        self._columns: dict[str, Tensor] = {}  # of the first rows, as far as they were asked for
        self._last = Answering(None, np.empty(0, np.int64), self.p[:0], 0.0, [], None)
        # Most algorithms keep nothing at the clients, and remember nothing of them.
        self._stateless = not list(leaves(self.own[0]))
        self._memoryless = not list(leaves(self._unknown))
        keeps = not (self._stateless and self._memoryless) or self.algorithm.personal
        keeps = keeps or settings.compress is not None
        self.dealing = Dealing(self.team, self.rounds.sizes, keeps)
        self.now, first = self._evaluate(self.now)
        self.rows: list[dict[str, Tensor]] = [first]
        # The loss of the initial model, [trials]: what later losses are compared with to find an
        # explosion. Without test rows it is measured on the training rows.
        self.start_loss = first["test_loss"]
        if not len(self.fed.test_rows):
            rows = self._rows("train")
            seen = self._prepare(self.now)
            x = self._models_here(self.now)
            self.start_loss = self.evaluator.loss(x, self.buffers, rows, seen)
        self._start_size = self.start_loss.abs().nan_to_num(0.0).clamp(min=SMALL)

    def _begin(self, module: nn.Module) -> State:
        """The state before the first round.

        All trials start from the same model. `own` repeats one object: a client's state becomes
        its own when it first takes part, which keeps large client states cheap until then.
        """
        x = ravel(module).expand(self.trials, -1).contiguous()
        buffers = buffers_of(module).to(self.device, self.dtype)
        # What is known of a client that has not answered: of all at first, later of the forgotten.
        self._unknown = self.algorithm.memory_init(x)
        clients = self.job.fed.clients
        ended = torch.full((self.trials,), -1, device=self.device)
        return State(
            k=0,
            server=self.algorithm.server_init(x),
            own=PerClient.alike(clients, self.algorithm.client_init(x)),
            memory=PerClient.alike(clients, self._unknown),
            errors={},
            buffers=buffers.expand(self.trials, -1).contiguous(),
            position=PerClient.alike(clients, 0),
            absence=Absence.none(clients),
            ended=ended,
            diverged=torch.zeros_like(ended),
            first_loss=self._all(torch.nan),
        )

    # ---- what is known now ----

    @property
    def k(self) -> int:
        """The number of rounds so far."""
        return self.now.k

    @property
    def server(self) -> Any:
        """The algorithm's server state."""
        return self.now.server

    @property
    def own(self) -> Sequence[Tree]:
        """Each client's own state."""
        return self.now.own

    @property
    def errors(self) -> Mapping[str, Tensor]:
        """What compression has held back so far."""
        return self.now.errors

    @property
    def buffers(self) -> Tensor:
        """The buffers of the model, [trials, b]."""
        return self.now.buffers

    @property
    def position(self) -> Ints:
        """How many mini-batches each client has drawn."""
        return np.fromiter(self.now.position, np.int64, self.fed.clients)

    @property
    def ended(self) -> Tensor:
        """The round in which each trial diverged or stopped, [trials]; -1: it is running."""
        return self.now.ended

    @property
    def diverged(self) -> Tensor:
        """The round in which each trial diverged, [trials]; 0: it has not."""
        return self.now.diverged

    @property
    def finished(self) -> bool:
        """Whether every trial has diverged or reached `stop_at`: no round is left to run."""
        return bool((self.ended >= 0).all())

    def models(self, state: State | None = None) -> Tensor:
        """The models that are evaluated, [trials, d], of a given state or of the present one.

        Where every client has its own model they are [clients, trials, d]. Several processes must
        then ask together.
        """
        now = self.now if state is None else state
        x = self._models_here(now)
        if self.team.size == 1 or not self.algorithm.personal:
            return x
        everywhere = _placed(x, torch.from_numpy(self.dealing.residents), self.fed.clients)
        models: Tensor = self.team.sum(everywhere)
        return models

    def _models_here(self, state: State) -> Tensor:
        """The same; of clients' own models those of the clients that live in this process."""
        if not self.algorithm.personal:
            return self.algorithm.model(state.server, ())
        x = self.algorithm.model(state.server, gathered(state.own))
        return (
            x if self.team.size == 1 else x[torch.from_numpy(self.dealing.residents).to(x.device)]
        )

    def _rows(self, part: str) -> Rows:
        """Test or training rows; where clients have own models, those of each that lives here."""
        if self.algorithm.personal:
            return [self.fed.rows_of(i, part) for i in self.dealing.residents.tolist()]
        return self.fed.test_rows if part == "test" else self.fed.train_rows

    def _prepare(self, state: State) -> Prepare:
        """What the models of a state see of rows that they are evaluated on."""
        return partial(self.algorithm.prepare, state.server)

    def _all(self, value: float) -> Tensor:
        """The same number for every trial, [trials]."""
        return torch.full((self.trials,), float(value), dtype=torch.float64, device=self.device)

    # ---- one round ----

    def round(self, last: bool = False) -> None:
        """Run one communication round; `last` forces an evaluation.

        Nothing changes until all of it is done: state and row are replaced together at the end.
        The column `seconds` is the wall time without evaluation, `bytes_up` and `bytes_down` are
        those of all clients together, for one trial.
        """
        began = time.perf_counter()
        self.team.spent = Spent()  # of this round alone, also after a resume or an evaluation
        k = self.k + 1
        ledger = Ledger(self.fed.clients, self.trials)
        tried, loss = self._exchange_all(k, ledger)
        judged = self._judge(tried, loss)
        up = self._all(ledger.up) - ledger.unsent
        met: dict[str, float] = {}
        if self.team.size > 1:
            up, judged, met = self.dealing.meet(tried, judged, up, began)
        new, row = self._settle(tried, loss, judged, last)
        spent = {"bytes_up": up, "bytes_down": self._all(ledger.down)}
        spent["seconds"] = self._all(time.perf_counter() - began)
        spent |= {name: self._all(value) for name, value in met.items()}
        found: dict[str, Tensor] = {}
        if last or k % self.settings.eval_every == 0:
            new, found = self._evaluate(new)
            sound = self._judge_evaluated(new, found, last)
            if not sound.all():
                # An evaluation has found an explosion that the loss of the round, which is that
                # before the step, could not show. The round is settled a second time, with these
                # trials lost.
                new, row = self._settle(tried, loss, sound & judged, last)
                new, found = self._evaluate(new)
        rows = [*self.rows, row | spent | found]
        vars(self).update(now=new, rows=rows)  # one call, which no interrupt can split

    def _exchange_all(self, k: int, ledger: Ledger) -> tuple[State, Tensor | None]:
        """All exchanges of round k: the state that they lead to, and the clients' mean loss.

        The loss [trials] is that of the last exchange that reported one; None if none did. An
        exchange that nobody answers ends the round: what later exchanges need has not arrived.
        """
        # What the exchanges write into is copied here, so that the present state stays as it is.
        # The trees in it are replaced, never written into.
        state = self.now._replace(
            k=k,
            own=self.now.own.copy(),
            memory=self.now.memory.copy(),
            errors=dict(self.errors),
            position=self.now.position.copy(),
        )
        loss: Tensor | None = None
        samples = 0
        plan = self.rounds.plan(k)
        # Where nobody answers the server's state must stay the same object: `_settle` looks at it.
        if self._answering(plan).mass > 0:
            state = self._forget(state)
        for number, phase in enumerate(self.algorithm.phases):
            if phase.fresh:
                samples += 1
                plan = self.rounds.plan(k, samples)
            asked = plan.lead if phase.lead else plan
            message = self._speak(phase, state, asked, ledger)
            # A cohort without weight moves nothing, as one that never answers.
            if not self._answering(asked).mass > 0:
                break
            state, heard = self._exchange(phase, number, message, state, asked, ledger)
            loss = loss if heard is None else heard
        return state, loss

    def _speak(self, phase: Phase, state: State, plan: Plan, ledger: Ledger) -> Tree:
        """The server's message of an exchange, counted for all who are chosen.

        Its leaves are [trials, ...]; where clients are told apart [answered, trials, ...].
        """
        if not phase.apart:
            message = phase.broadcast(state.server)
            ledger.broadcast((message, state.buffers), plan.chosen)
            return message
        letters = phase.broadcast(state.server, plan.chosen.to(self.device))
        ledger.letters(letters)
        ledger.broadcast(state.buffers, plan.chosen)
        answered = torch.isin(plan.chosen, plan.answered).to(self.device)
        return tree_map(lambda leaf: leaf[answered], letters)

    def _exchange(
        self,
        phase: Phase,
        number: int,
        message: Tree,
        state: State,
        plan: Plan,
        ledger: Ledger,
    ) -> tuple[State, Tensor | None]:
        """One exchange: clients work in chunks, their uploads are averaged, the server moves.

        Args:
            phase: The algorithm's functions for this exchange.
            number: Which exchange of the round it is; what compression holds back is kept apart
                by it.
            message: What `_speak` returned.
            state: The round's own copy. Its lists, which nobody else holds, are written into.
            plan: Who answers, and after how many local steps.
            ledger: Counts what is sent up.

        Returns:
            The state after the exchange, and the weighted mean [trials] of the clients' losses or
            None.

        A client that answers moves on in its stream of mini-batches by the steps of this
        exchange. One that does not answer stays where it is in its stream and keeps its state.
        """
        _, who, weight, mass, shares, lender = self._answering(plan)
        steps = phase.steps(plan.steps).numpy()
        own = state.own
        memory = state.memory
        mean: Tree = None
        loss: Tensor | None = None
        start = state.buffers
        buffers = start
        work = partial(self._work, phase, message, state, steps)
        for share, (reply, learned) in zip(shares, self.crew.each(work, shares), strict=True):
            part, clients, ids, w = share
            sent, upload = self.uplink(phase, number, ids, reply.upload, state.errors)
            ledger.upload((sent, learned), len(clients), reply.unsent)
            remembered = self._unknown
            if not self._memoryless:
                remembered = gathered(memory.take(ids))
            received, remembered = phase.receive(state.server, upload, remembered, state.k)
            # The mean over all clients grows chunk by chunk, so that uploads of one chunk alone
            # are in memory. What is heard apart is put into its places instead.
            if phase.apart:
                places = (torch.from_numpy(part), len(who))
                part_mean = tree_map(lambda leaf, at=places: _placed(leaf, *at), received)
            else:
                part_mean = phase.over_clients(w, received)
            mean = part_mean if mean is None else phase.together(mean, part_mean)
            if reply.loss is not None:
                part_loss = torch.tensordot(w.double(), reply.loss.double(), 1)
                loss = part_loss if loss is None else loss + part_loss
            self._check_same_state(reply.own)
            if not self._stateless:
                _keep_parts(own, ids, reply.own)
            if not self._memoryless:
                _keep_parts(memory, ids, remembered)
            if start.numel():
                moved = torch.tensordot(w, learned - start, 1)
                buffers = buffers + moved  # a difference, so that a constant stays to the bit
        if self.team.size > 1:
            mean, loss = self.dealing.filled(phase, mean, loss, lender, self.device)
            mean, loss, moved = self.dealing.exchanged(phase, mean, loss, buffers - start)
            buffers = start + moved
        taken = float((weight * torch.from_numpy(steps)).sum())
        heard = None if loss is None else loss.unsqueeze(-1)
        cohort = Cohort(state.k, len(who), plan.answered, mass, taken, heard)
        heard_of = who.tolist()
        before = state.position.take(heard_of)
        moved_on = steps + np.array(before, np.int64)
        state.position.put(heard_of, moved_on.tolist())
        # Where nothing is remembered of clients, there is nothing to forget.
        absence = state.absence
        if not self._memoryless:
            absence = absence.heard(heard_of, mass)
        server = phase.server(state.server, mean, cohort)
        return state._replace(server=server, buffers=buffers, absence=absence), loss

    def _work(
        self, phase: Phase, message: Tree, state: State, steps: Ints, desk: Desk, share: Share
    ) -> tuple[Reply, Tensor]:
        """What the clients of one chunk reply, and their buffers afterwards.

        Several threads may call it, each with a desk of its own: it writes nowhere else.
        """
        part, clients, ids, _ = share
        position = np.array(state.position.take(ids), np.int64)
        local = Chunk(desk.gather, self.rounds, state.k, clients, position, steps[part])
        # Every client starts from the server's buffers and changes a copy of them while it trains.
        start = state.buffers
        desk.f.buffers = start.expand(len(clients), *start.shape).clone()
        before = state.own[0] if self._stateless else gathered(state.own.take(ids))
        told = tree_map(lambda leaf: leaf[part], message) if phase.apart else message
        reply = phase.client(desk.f, told, before, local)
        return reply, desk.f.buffers

    def _answering(self, plan: Plan) -> Answering:
        """Those who answer by this plan, and the chunks of those that this process computes.

        The mean is over those who answered: weights p_i of the absent are shared out among them.
        """
        if self._last.plan is not plan:
            who = plan.answered.numpy()
            total = self.p[who].sum()
            weight = self.p[who] / total
            # The work of a client is the number of rows that it will see.
            ranks = self.dealing.ranks(who, plan.steps.numpy() * self.rounds.width[who])
            mine = np.flatnonzero(ranks == self.team.rank)
            shares = []
            for some in self._chunks(who[mine]):
                part = mine[some]
                clients = who[part]
                own = weight[part].to(self.device, self.dtype)
                shares.append(Share(part, clients, clients.tolist(), own))
            lender = self.dealing.lender(ranks)
            self._last = Answering(plan, who, weight, float(total), shares, lender)
        return self._last

    def _forget(self, state: State) -> State:
        """The state without what the server remembers of clients that stay away.

        They are those who have not answered while the others did so `FORGOTTEN` times each, on
        average. The memory of the given state is written into.
        """
        away = state.absence.beyond(FORGOTTEN)
        if not away:
            return state
        state = state._replace(absence=state.absence.heard(away, 0.0))
        # Of a client that has never answered there is nothing to forget.
        pairs = zip(away, state.memory.take(away), strict=True)
        here = [i for i, kept in pairs if not _equal(kept, self._unknown)]
        gone = sorted(itertools.chain(*self.team.share(self.team.gather(here))))
        if not gone:
            return state
        lost = tree_map(torch.zeros_like, self._unknown)
        if here:
            p = self.p[here].to(self.device, self.dtype)
            of_gone = gathered(state.memory.take(here))
            lost = tree_map(lambda leaf: _weighted(p, leaf), of_gone)
        lost = self.team.sum(lost)
        state.memory.put(here, [self._unknown] * len(here))
        log.info("round %d: client(s) %s are forgotten", state.k, ", ".join(map(str, gone)))
        return state._replace(server=self.algorithm.forget(state.server, lost))

    def _check_same_state(self, own: Tree) -> None:
        """A client must keep what `client_init` gave it: a resumed run could not read other.

        Only the names of the leaves are compared. The check is for authors of algorithms.
        """
        if own is self.own[0]:
            return
        given = [name for name, _ in named_leaves(self.own[0], "own")]
        kept = [name for name, _ in named_leaves(own, "own")]
        if given != kept:
            kind = type(self.algorithm).__name__
            raise InputError(
                f"{kind}: a client keeps {kept}, but client_init gave it {given}; they must agree"
            )

    def _chunks(self, who: Ints) -> Iterator[Ints]:
        """Positions in `who`, clients of similar size together, as many as the budget holds.

        Clients are sorted by the width of their mini-batches, the widest first. All batches of a
        chunk are padded to its widest one, so neighbours in this order waste little. Results do
        not depend on the chunks but for rounding. One client at a time is taken where the back
        end or the algorithm cannot take more.
        """
        if not self.f.stacks or self.algorithm.alone:
            yield from np.arange(len(who))[:, None]
            return
        order = np.lexsort((who, -self.rounds.width[who]))
        item = torch.finfo(self.dtype).bits // 8
        # An estimate: local SGD holds three vectors of the model's size for each trial, and works
        # on more; others hold matrices.
        d = sum(self.f.layout.sizes)
        state = (4 * d + self.algorithm.squares * d * d) * self.trials * item
        start = 0
        while start < len(order):
            widths = self.rounds.width[who[order[start:]]]
            rows = int(widths[0]) * self.gather.row_bytes
            size = max(1, BUDGET[self.device.type] // (rows + state))
            if self.device.type == "cpu":  # a GPU wants few large chunks, a CPU little padding
                similar = int((widths >= SIMILAR * widths[0]).sum())
                size = min(size, max(MIN_CHUNK, similar))
            yield order[start : start + size]
            start += size

    # ---- which trials go on ----

    def _first(self, loss: Tensor | None) -> Tensor:
        """The loss of the first round that was answered, [trials]; NaN before it."""
        heard = self._all(torch.nan) if loss is None else loss
        return torch.where(self.now.first_loss.isnan(), heard, self.now.first_loss)

    def _limit(self, first: Tensor) -> Tensor:
        """The largest loss that is no explosion, [trials].

        It is the first loss times what the algorithm bears (`Algorithm.bears`, usually 1000). A
        skewed first cohort may fit badly or, by chance, well: the loss of the initial model
        counts as well, and a first loss that would itself be an explosion is not believed.
        """
        start = self._start_size
        rise = self.algorithm.bears(self.server)
        plausible = torch.where(first.abs() <= rise * start, first.abs(), start)
        limit: Tensor = rise * torch.maximum(start, plausible)
        return limit

    def _judge(self, tried: State, loss: Tensor | None) -> Tensor:
        """Which trials have a finite model and a loss that is no explosion, [trials] of booleans.

        A round's loss is that at the models before its step, so that it judges the step of the
        round before. Where every client has a model, all of a trial's models must be finite.
        """
        finite = self._models_here(tried).isfinite().all(-1)
        if finite.dim() > 1:
            finite = finite.all(0)
        if loss is None:
            return finite
        return finite & _within(loss, self._limit(self._first(loss)))

    def _judge_evaluated(self, new: State, found: dict[str, Tensor], last: bool) -> Tensor:
        """Which trials' new models an evaluation finds sound, [trials].

        A test loss must be a number. The last model, which no later round judges, must not be an
        explosion either. A large test loss may belong to a good fit, so that it is one only if the
        loss over all training rows is as large.
        """
        tested = found["test_loss"]
        limit = self._limit(new.first_loss)
        judged = (self.ended < 0) & (new.diverged == 0)
        sound = torch.ones_like(judged)
        if len(self.fed.test_rows):
            sound = ~judged | tested.isfinite()
        doubtful = judged & sound & ~_within(tested, limit)
        if not last or not doubtful.any():
            return sound
        trained = found.get("full_train_loss")
        if trained is None:
            trained = self._full_train_loss(new)
        bounded: Tensor = sound & (~doubtful | _within(trained, limit))
        return bounded

    def _settle(
        self, tried: State, loss: Tensor | None, sound: Tensor, last: bool
    ) -> tuple[State, dict[str, Tensor]]:
        """The new state, and the row of the trace.

        Args:
            tried: The state that the exchanges led to.
            loss: The round's mean loss, [trials]; None if nobody reported one.
            sound: Which trials may keep what they tried, [trials] of booleans.
            last: Whether this is the last round, after which an undone round cannot be repeated.

        A trial whose round is not sound goes back to where its algorithm says; where that cannot
        be it has diverged. A diverged or stopped trial is frozen: it keeps its last sound state
        while its neighbours go on, since they share their tensors. The training loss of frozen
        and undone trials is NaN.
        """
        now = self.now
        running = now.ended < 0
        alive = running & sound
        if alive.all():
            return self._kept(tried, loss)
        lost = running & ~sound

        def keep(old: Tensor, new: Tensor) -> Tensor:
            return choose(alive, new, old)

        server = tree_map(keep, now.server, tried.server)
        own = tried.own.merged(now.own, partial(tree_map, keep))
        memory = tried.memory.merged(now.memory, partial(tree_map, keep))
        errors = {}
        for name, error in tried.errors.items():
            before = now.errors.get(name, torch.zeros_like(error))
            errors[name] = keep(before, error)
        # Going back is no use where even the initial model has no finite loss, or where no round
        # was ever sound and none is left.
        never_sound = now.first_loss.isnan() & last
        hopeful = self.start_loss.isfinite() & ~never_sound
        server, undone = self._undo(server, lost & hopeful, tried.k)
        died = lost & ~undone
        new = tried._replace(
            server=server,
            own=own,
            memory=memory,
            errors=errors,
            buffers=keep(now.buffers, tried.buffers),
            first_loss=torch.where(undone, now.first_loss, self._first(loss)),
            diverged=torch.where(died, tried.k, now.diverged),
            ended=torch.where(died, tried.k, now.ended),
        )
        heard = self._all(torch.nan) if loss is None else loss
        told = heard + torch.where(running & ~undone, 0.0, torch.nan)
        moved = tried.server is not now.server  # else nobody answered, and there is nothing to tell
        nan = torch.where((alive | undone) & moved, 0.0, torch.nan)
        return new, self._row(server, told, nan)

    def _kept(self, tried: State, loss: Tensor | None) -> tuple[State, dict[str, Tensor]]:
        """As `_settle`, where every trial is running and keeps what it tried: nothing is chosen."""
        moved = tried.server is not self.now.server
        heard = self._all(torch.nan) if loss is None else loss
        row = self._row(tried.server, heard + 0.0, 0.0 if moved else torch.nan)
        return tried._replace(first_loss=self._first(loss)), row

    def _row(self, server: Any, loss: Tensor, nan: Scalar) -> dict[str, Tensor]:
        """The row of the trace: the training loss, and what the algorithm tells.

        `nan` is added to the latter: NaN where there is nothing to tell, else 0.
        """
        told = self.algorithm.diagnostics(server)
        values = (torch.stack([value.double() for value in told.values()]) + nan) if told else ()
        return {"train_loss": loss} | dict(zip(told, values, strict=True))

    def _undo(self, server: Any, lost: Tensor, k: int) -> tuple[Any, Tensor]:
        """Let the algorithm take back the trials that are lost, [trials] of booleans.

        `Algorithm.undo` is asked for the state to go on from, given the state before the round.
        Returns the server state with these trials taken back, and the trials [trials] with which
        that was possible.
        """
        found = self.algorithm.undo(self.server) if lost.any() else None
        if found is None:
            return server, torch.zeros_like(lost)
        back, possible = found
        undone = lost & possible
        count = int(undone.sum())
        log.info("round %d exploded: undone in %d of %d trial(s)", k, count, self.trials)
        return tree_map(lambda new, old: choose(undone, new, old), back, server), undone

    # ---- evaluation ----

    def _evaluate(self, new: State) -> tuple[State, dict[str, Tensor]]:
        """Metrics of a new state, and the state with the trials ended that reach `stop_at`.

        The columns are test_loss, test_accuracy and the other metrics, with `eval_train` also
        full_train_loss; each [trials]. Diverged trials have accuracy 0 and NaN elsewhere, so that
        no summary of the trace can take them for good ones. Where no model has an accuracy (under
        mse, or without test rows) theirs is NaN as well: a 0 would pass for the best one there is.
        """
        dead = new.diverged > 0
        nan = torch.where(dead, torch.nan, 0.0)
        seen = self._prepare(new)
        x = self._models_here(new)
        found = self.evaluator(x, new.buffers, self._rows("test"), seen)
        row = {f"test_{name}": value + nan for name, value in found.items()}
        # A diverged trial keeps its last sound model, so this tells if there is an accuracy at all.
        wrong = dead & ~found["accuracy"].isnan()
        row["test_accuracy"] = torch.where(wrong, 0.0, row["test_accuracy"])  # no answer is right
        if self.settings.eval_train:
            row["full_train_loss"] = self._full_train_loss(new) + nan
        if self.settings.stop_at is not None:
            reached = (new.ended < 0) & (row["test_accuracy"] >= self.settings.stop_at)
            new = new._replace(ended=torch.where(reached, new.k, new.ended))
        return new, row

    def _full_train_loss(self, new: State) -> Tensor:
        """f(x) = sum p_i f_i(x) over all training rows, with the penalty l2/2 |x|^2, [trials].

        With the default weights every row counts the same, and one pass over all rows is enough.
        With weights of the user's own each client's mean loss is needed.
        """
        x = self._models_here(new)
        seen = self._prepare(new)
        buffers = new.buffers
        personal = x.dim() > 2
        here = self.dealing.residents if personal else np.arange(self.fed.clients)
        squares = x.double().square().sum(-1)
        if personal:
            p = self.p[here].to(x.device)
            squares = self.team.sum(torch.tensordot(p, squares, 1))
        penalty = self.settings.l2 / 2 * squares
        if self.job.fed.weights is None:
            return self.evaluator.loss(x, buffers, self._rows("train"), seen) + penalty
        if not personal:
            here = here[self.team.rank :: self.team.size]
        points = x.expand(len(here), *x.shape[-2:])
        each = [x.new_zeros(x.shape[-2], dtype=torch.float64)] * len(here)
        for m, i in enumerate(here.tolist()):
            rows = self.fed.rows_of(i)
            total = self.evaluator.total(points[m], buffers, rows, seen)
            each[m] = total / max(1, len(rows))
        p = self.p[here].to(x.device)
        loss = torch.stack(each) if each else x.new_zeros(0, x.shape[-2], dtype=torch.float64)
        mean: Tensor = self.team.sum(torch.tensordot(p, loss, 1))
        return mean + penalty

    # ---- checkpoints ----

    def state(self) -> dict[str, Tensor]:
        """Everything a later process needs to go on, as named tensors.

        No generator is among them: draws are functions of seed, client and round, and `position`
        says how far each client is in its stream. Several processes must ask together, and the
        first of them gets the states of all clients. `contents` lists the columns and the errors of
        compression in their order, which a file of tensors does not keep, and the clients whose
        states are there: those of others are as at the start.
        """
        out: dict[str, Tensor] = {}
        now = self.dealing.collected(self.now, self._initial)
        for name in KEPT:
            out |= dict(named_leaves(getattr(now, name), name))
        names: dict[str, list[str]] = {}
        for name in BY_CLIENT:
            held = getattr(now, name)
            changed = held.changed_from(self._initial[name])
            names[name] = [str(i) for i in changed]
            for i, tree in zip(changed, held.take(changed), strict=True):
                out |= dict(named_leaves(tree, f"{name}.{i}"))
        for name, error in now.errors.items():
            out[f"errors.{name}"] = error
        out["position"] = torch.from_numpy(self.position)
        out["unheard"] = torch.from_numpy(self.now.absence.each())
        out["k"] = torch.tensor(self.k)
        columns = self.columns()
        for name, column in columns.items():
            out[f"rows.{name}"] = column
        names |= {"rows": list(columns), "errors": list(now.errors)}  # in their order
        out["contents"] = of_text(json.dumps(names))
        return out

    def columns(self) -> dict[str, Tensor]:
        """The rows so far as columns [rows, trials]; what a row does not have is NaN.

        Columns are kept, and rows that came since the last call are put below them: with a
        checkpoint in every round the work would otherwise grow with the square of the rounds.
        """
        old = self._columns
        height = len(next(iter(old.values()), ()))
        new = self.rows[height:]
        if not new:
            return dict(old)
        nan = self._all(torch.nan)
        names = dict.fromkeys(old)
        for row in new:
            names |= dict.fromkeys(row)
        grown = {}
        for name in names:
            above = old.get(name, nan.expand(height, -1))
            below = torch.stack([row.get(name, nan) for row in new])
            grown[name] = torch.cat((above, below))
        self._columns = grown  # at once, so that an interrupt leaves columns of one height
        return dict(grown)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from `state()`; the caller has checked that it belongs to the same settings.

        Nothing is used before shapes, types and numbers are found to be those of this run.

        Raises:
            Damaged: A tensor is missing, has another shape or type, or holds numbers that no run
                of these settings can have reached. The simulation is then as it was.
        """
        read = Reader(saved, self.device)
        k = read.count("k")
        columns, lossy = read.contents("contents", "rows", "errors")
        shape = (k + 1, self.trials)
        rows = {name: read.tensor(f"rows.{name}", shape, torch.float64) for name in columns}
        lost = torch.empty(self.trials, self.uplink.width, dtype=self.dtype)
        errors = {name: read.like(f"errors.{name}", lost) for name in lossy}
        position = read.tensor("position", (self.fed.clients,), torch.int64)
        unheard = torch.zeros(self.fed.clients, dtype=torch.float64)  # of earlier versions
        if "unheard" in saved:
            unheard = read.tensor("unheard", unheard.shape, unheard.dtype)
        trees = {name: read.tree(name, getattr(self.now, name)) for name in KEPT}
        for name in BY_CLIENT:
            trees[name] = self._initial[name].copy()
            for i in read.clients("contents", name, self.fed.clients):
                trees[name].put([i], [read.tree(f"{name}.{i}", trees[name][i])])
        steps = PerClient(position.tolist())
        absence = Absence.of(unheard.cpu().numpy())
        state = self.now._replace(k=k, errors=errors, position=steps, absence=absence, **trees)
        state = self.dealing.dispersed(state, self._initial)
        if not self._models_here(state).isfinite().all():
            raise Damaged("the checkpoint's model holds NaN or infinite numbers")
        ended = state.ended
        diverged = state.diverged
        counts = (
            position >= 0,
            unheard >= 0,
            ended >= -1,
            ended <= k,
            diverged >= 0,
            diverged <= k,
        )
        if not all(bool(right.all()) for right in counts):
            raise Damaged(f"the checkpoint counts rounds or steps that cannot be after {k} rounds")
        self.now = state
        self.rows = []
        for i in range(k + 1):
            self.rows.append({name: column[i] for name, column in rows.items()})
        self._columns = rows


def _weighted(weights: Tensor, leaf: Tensor) -> Tensor:
    """The sum of a leaf [clients, ...] over the clients, with weights [clients]."""
    total: Tensor = torch.tensordot(weights.to(leaf.dtype), leaf, 1)
    return total


def _keep_parts(kept: PerClient[Tree], ids: Sequence[int], tree: Tree) -> None:
    """Give each client its own part of a tree with leaves [clients, ...]."""
    parts = [tree_map(lambda leaf, m=m: part_of(leaf, m), tree) for m in range(len(ids))]
    kept.put(ids, parts)


def _placed(leaf: Tensor, places: Tensor, clients: int) -> Tensor:
    """A leaf [M, ...] of M clients at their places among all, [clients, ...]; 0 elsewhere."""
    room = leaf.new_zeros(clients, *leaf.shape[1:])
    return room.index_copy_(0, places.to(leaf.device), leaf)


def _equal(tree: Tree, other: Tree) -> bool:
    """Whether two trees of the same shape hold the same numbers."""
    pairs = zip(named_leaves(tree, ""), named_leaves(other, ""), strict=True)
    return all(torch.equal(leaf, like) for (_, leaf), (_, like) in pairs)


def _within(loss: Tensor, limit: Tensor) -> Tensor:
    """Whether a loss is a finite number and within the limit in size, [trials] of booleans."""
    return loss.isfinite() & (loss.abs() <= limit)


def run(simulation: Trials, until: int, after: Callable[[Trials], None] = lambda _: None) -> None:
    """Advance to round `until`, calling `after` behind each round.

    It ends early when no trial is left. The last round that the settings ask for is evaluated in
    any case. Autograd is off meanwhile: back ends that need it switch it on for themselves. An
    exception in `after`, such as an interrupt, leaves the simulation between two rounds.

    Several processes stop together: a signal to one of them takes effect on all behind the round
    that is under way, or behind the next.
    """
    rounds = simulation.settings.rounds
    threads = one_thread_for_small_models(simulation)
    halting = Halting(simulation.team)
    with torch.no_grad(), threads, plain_convolutions(simulation.job.module), halting:
        while simulation.k < until and not simulation.finished:
            simulation.round(last=simulation.k + 1 == rounds)
            with halting.deferred():
                after(simulation)
            halting.stop_if_agreed()

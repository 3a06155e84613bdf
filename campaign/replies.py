"""Hostile replies to every strategy: one of six nodes lies in every round."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedsso.algorithms import ALGORITHMS

from . import verdict as v
from .forks import Ending, forked
from .scenes import flower_tests, from_tests
from .verdict import Case, Result

PART = "replies"
QUICK = 80
CLIENTS, ROUNDS, LIAR = 6, 2, 1
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
INSIDE = ("FedMedian", "Krum", "FedTrimmedAvg")
FAR = 1000.0  # times as far as an honest node takes the model, or as 1: 20 lengths with 50 weights
CONVEX = {
    *("aide", "dane", "disco", "done", "fednew", "fednl", "fednl-ls", "fednl-pp", "fedpm"),
    *("giant", "localnewton"),
}
"""Algorithms for convex problems: a network takes some of them far away by itself."""
REMEMBER = {"fedvarp", "mifa", "bl1", "bl2", "bl3", "mocha"}
"""Algorithms whose servers tell single clients apart: the strategy refuses them."""
ONE_OUTPUT = {"nl1", "nl2"}
"""Algorithms for models of one output, which those here are not."""
OWN: dict[str, dict[str, Any]] = {"fedsso": {"alpha": 0.05}, "harmofl": {"sample": "4"}}
"""Settings that an algorithm needs on a network."""


class Net(nn.Module):
    """A small model with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def _model(name: str) -> Callable[[], nn.Module]:
    """What a strategy of that name trains."""
    return _linear if name.rpartition(" ")[2] in CONVEX else Net


def _rows(context: Any) -> tuple[Tensor, Tensor]:
    """A node's own rows."""
    i = int(context.node_config["partition-id"])
    draw = torch.Generator().manual_seed(i)
    x = torch.randn(20 + 5 * i, 4, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Known(NamedTuple):
    """The same run with good replies alone, and with those of the liar lost."""

    whole: dict[str, Any]
    without: dict[str, Any]


def strategies() -> dict[str, Callable[[], Any]]:
    """FedSSO, alone and around robust averages, and every algorithm that PhasedStrategy takes."""
    from flwr.serverapp import strategy as flower

    from fedsso.flower import FedSSO, PhasedStrategy

    clients = flower_tests()
    alone = partial(FedSSO, eta_l=clients.ALPHA, local_steps=clients.STEPS)
    extra = {"Krum": {"num_malicious_nodes": 1}}
    made: dict[str, Callable[[], Any]] = {"FedSSO": partial(alone, **QUIET)}
    for name in INSIDE:
        inner = partial(getattr(flower, name), **QUIET, **extra.get(name, {}))
        made[f"FedSSO of {name}"] = partial(_around, alone, inner)
    for name in ALGORITHMS:
        if name in REMEMBER | ONE_OUTPUT:
            continue
        own = OWN.get(name, {})
        phased = partial(PhasedStrategy, name, local_steps=3, **own, **QUIET)
        made[f"PhasedStrategy {name}"] = phased
    return made


def _around(outer: Callable[..., Any], inner: Callable[[], Any]) -> Any:
    return outer(inner=inner())


def cases(_folder: Path, seed: int, quick: bool) -> list[Case]:
    """Every strategy with every kind of hostile reply."""
    hostile = from_tests("flower", "hostile")
    every = [(name, kind) for name in strategies() for kind in hostile.HOSTILE]
    linear = {name for name in strategies() if _model(name) is _linear}  # without statistics
    pairs = [(n, kind) for n, kind in every if n not in linear or kind not in hostile.STATISTICS]
    random.Random(f"{seed} {PART}").shuffle(pairs)
    if quick:
        pairs = pairs[:QUICK]
    known = {name: _known(name) for name in dict.fromkeys(name for name, _ in pairs)}
    return [partial(_case, number, *pair, known[pair[0]]) for number, pair in enumerate(pairs)]


def _known(name: str) -> Known:
    found = [forked(partial(_run, name, kind)) for kind in ("", "lost")]
    for ended in found:
        if ended.code or ended.error:
            raise RuntimeError(f"{name} fails with good replies: {ended.error or ended.said}")
    return Known(found[0].value, found[1].value)


def _run(name: str, kind: str) -> dict[str, Any]:
    """A few rounds; the model at the end, and whether rounds kept it."""
    from flwr.app import ArrayRecord

    from fedsso.flower import client_app

    clients, grids, hostile = (
        flower_tests(),
        from_tests("flower", "grid"),
        from_tests("flower", "hostile"),
    )
    plain = name.startswith("FedSSO")

    def tamper(reply: Any) -> Any:
        lies = reply.metadata.src_node_id == grids.NODES[LIAR] and not reply.has_error()
        return hostile.HOSTILE[kind].change(reply, grid.asked) if kind and lies else [reply]

    app = clients.app if plain else client_app(_model(name), _rows)
    grid = grids.LocalGrid(app, [{"partition-id": i} for i in range(CLIENTS)], tamper)
    start = clients.initial(0.1) if plain else ArrayRecord(_model(name)().state_dict())
    strategy = strategies()[name]()
    result = strategy.start(grid, start, num_rounds=ROUNDS)
    model = {key: array.numpy().ravel().tolist() for key, array in result.arrays.items()}
    return {"rounds": strategy.k, "model": model, "kept": strategy.trace["kept"].tolist()}


def _case(number: int, name: str, kind: str, known: Known) -> Result:
    effect = from_tests("flower", "hostile").HOSTILE[kind].effect
    ended = forked(partial(_run, name, kind))
    found, told = _judge(effect, ended, known)
    return Result(PART, number, name, kind, found, told, ended.seconds)


def _judge(effect: str, ended: Ending, known: Known) -> tuple[str, str]:
    hostile = from_tests("flower", "hostile")
    if ended.hung:
        return v.HANG, ended.said[-300:]
    if ended.out_of_memory:
        return v.MEMORY, (ended.error or ended.said)[-300:]
    if ended.error or ended.code:
        return v.TRACEBACK, (ended.error or ended.said)[-700:]
    found = ended.value
    if found["rounds"] != ROUNDS:
        return v.LOST, f"{found['rounds']} of {ROUNDS} rounds"
    if effect == hostile.DROPPED:
        same = found["model"] == known.without["model"]
        return (v.REFUSED, "") if same else (v.WRONG, _apart(found, known.without))
    if effect in (hostile.CLIPPED, hostile.BOUNDED):
        return _bounded(found, known)
    same = found["model"] == known.whole["model"]
    return (v.RIGHT, "") if same else (v.WRONG, _apart(found, known.whole))


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference between two models; counts aside."""
    pairs = [(a["model"][key], b["model"][key]) for key in a["model"] if "num_" not in key]
    apart = [abs(x - y) for one, other in pairs for x, y in zip(one, other, strict=True)]
    return float(max(apart))


def _bounded(found: dict[str, Any], known: Known) -> tuple[str, str]:
    """The liar counts, but does not win."""
    far, honest = _distance(found, known.without), _distance(known.whole, known.without)
    if far < FAR * max(1.0, honest):
        return v.RIGHT, ""
    return v.WRONG, f"the model is {far:.3g} away, an honest node takes it {honest:.3g}"


def _apart(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    return f"another model, by {_distance(found, wanted):.3g}; kept rounds: {found['kept']}"

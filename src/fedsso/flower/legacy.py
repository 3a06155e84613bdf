"""FedSSO for secure aggregation (SecAgg+), which Flower offers to its earlier generation of
strategies alone.

    strategy = LegacyFedSSO(eta_l=0.01, local_steps=5, min_fit_clients=4, min_available_clients=4)
    secure = SecAggPlusWorkflow(3, 2, max_weight=120.0, clipping_range=4.0,
    quantization_range=2**24) DefaultWorkflow(fit_workflow=secure)(grid, LegacyContext(context,
    ServerConfig(num_rounds=20), strategy))

The ClientApp is made with `mods=[secaggplus_mod]`. Of the models the server then sees nothing but
the weighted mean, and that is all FedSSO asks for; num_examples and metrics it sees as before.

Each of the n clients scales its model by w = num_examples / max_weight, cuts it to +-clipping_range
and rounds it to quantization_range levels. This leaves in the mean an error of about 2
clipping_range / quantization_range sqrt(n / 6) / sum(w), which g holds divided by eta_l
local_steps. So let max_weight be the largest num_examples, so that w is near 1; clipping_range
little more than the largest parameter in size; and quantization_range 2^24, beyond which float32
gains nothing (float64: up to 2^30). n quantization_range must stay below modulus_range (2^32):
beyond it the sum wraps, and the model is wrong without any error. All arrays are cut alike,
statistics of BatchNorm as well.

Nobody can look at one client's model, so nobody can refuse or clip it: NaN becomes an arbitrary
number on its way. A client whose training failed must raise an error, which leaves it out of the
round.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
from flwr.common import (
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from numpy.typing import NDArray

from ..algorithm.schedule import Step
from ..errors import InputError, integer
from . import bounds, privacy, statistics
from .bounds import Clip, checked
from .screen import HEAVY, farthest, header, heaviest, holds
from .settings import server, split, told
from .wire import Arrays, Model

log = logging.getLogger("flwr")
FEDAVG = tuple(signature(FedAvg).parameters)
Replies = list[tuple[ClientProxy, FitRes]]


class LegacyFedSSO(FedAvg):
    """Flower's earlier FedAvg, whose mean FedSSO makes a step of; it takes the fields of both as
    keywords.

    `buffers` are the positions of arrays that are averaged and never stepped (BatchNorm's running
    statistics); integers always are. `clip` bounds what one reply can do beside the others, where
    they can be seen; None does not.
    """

    def __init__(
        self,
        *,
        eta_l: Step | None = None,
        local_steps: float | None = None,
        buffers: Collection[int] = (),
        clip: Clip | None = Clip(),  # noqa: B008
        **keywords: Any,
    ) -> None:
        values, options = split(keywords, ("eta_l", "local_steps", "buffers", "clip"), FEDAVG)
        super().__init__(**{"inplace": False, **options})  # in place, the mean of integers is 0
        self.server = server(eta_l, local_steps, values)
        self.buffers = [integer("each of buffers", i, 0) for i in buffers]
        self.clip = checked(clip)
        self.sent: Arrays = {}

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """FedAvg's instructions; the model that is sent is x_k."""
        privacy.refuse_outside()
        self.sent = _named(parameters)
        _check(self.sent, self.buffers)
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """The next model and what its step knows of the curvature; no model where there is no
        usable mean."""
        model = Model(self.sent, [str(i) for i in self.buffers])
        faults = _faults(model, self.sent, [reply for _, reply in results])
        for fault in sorted({*faults} - {""}):
            log.warning(
                "round %d: %d of %d replies dropped: %s",
                server_round,
                faults.count(fault),
                len(faults),
                fault,
            )
        good = [pair for pair, fault in zip(results, faults, strict=True) if not fault]
        good, clipped = self._bounded(good, model)
        for line in clipped:
            log.warning("round %d: a reply clipped: %s", server_round, line)
        mean, metrics = super().aggregate_fit(server_round, good, failures)
        if mean is None:
            log.warning("round %d: %d usable replies, the model is kept", server_round, len(good))
            return None, {}
        arrays = _named(mean)
        x = self.server.step(model.ravel(self.sent), model.ravel(arrays), server_round)
        new = [array.numpy() for array in model.record(x, arrays).values()]
        numbers = {"dropped": float(len(results) - len(good)), "clipped": float(len(clipped))}
        return ndarrays_to_parameters(new), {
            **metrics,
            **told({**self.server.diagnostics(), **numbers}),
        }

    def _bounded(self, good: Replies, model: Model) -> tuple[Replies, list[str]]:
        """The replies, of which none counts many times more than the others, and what was clipped
        of them."""
        replies = [reply for _, reply in good]
        if self.clip is None or _secret(replies):
            return good, []
        lines: list[list[str]] = [[] for _ in good]
        arrays = [_named(reply.parameters) for reply in replies]
        kinds, order = model.kinds, list(dict.fromkeys(model.kinds.values()))
        lengths = [bounds.moves(one, self.sent, kinds) for one in arrays]
        weights = [float(reply.num_examples) for reply in replies]
        heavy = bounds.factors(weights, self.clip.weight)
        columns = [
            bounds.factors([of[j] for of in lengths], self.clip.multiple(k))
            for j, k in enumerate(order)
        ]
        for i, line in enumerate(lines):
            line += [bounds.told("weight", weights[i], heavy[i])] if heavy[i] < 1 else []
            far = [
                (kind, lengths[i][j], columns[j][i])
                for j, kind in enumerate(order)
                if columns[j][i] < 1
            ]
            line += [bounds.told(f"{kind} of length", length, scale) for kind, length, scale in far]
            if line:
                scales = {kind: column[i] for kind, column in zip(order, columns, strict=True)}
                near = bounds.shortened(arrays[i], self.sent, kinds, scales)
                parameters = ndarrays_to_parameters(list(near.values()))
                count = max(1, int(weights[i] * heavy[i]))
                good[i] = good[i][0], replace(replies[i], parameters=parameters, num_examples=count)
        return good, ["; ".join(line) for line in lines if line]


def _secret(replies: Sequence[FitRes]) -> bool:
    """Whether each reply holds the mean itself, as with SecAgg+."""
    return all(reply.parameters.tensors == replies[0].parameters.tensors for reply in replies)


def _named(parameters: Parameters) -> Arrays:
    """Arrays by their position."""
    return {str(i): array for i, array in enumerate(parameters_to_ndarrays(parameters))}


def _check(arrays: Arrays, buffers: list[int]) -> None:
    """Refuse positions that do not exist, and what SecAgg+ averages wrongly."""
    if any(i >= len(arrays) for i in buffers):
        raise InputError(
            f"buffers are positions among the model's {len(arrays)} arrays, from 0 on; got "
            f"{buffers}"
        )
    single = [name for name, array in arrays.items() if array.ndim == 0]
    if single:
        raise InputError(
            f"array {', '.join(single)} of the model is a single number without an axis, which "
            f"Flower's SecAgg+ "
            "averages wrongly; send it with the shape (1,), or leave it out (BatchNorm's "
            "num_batches_tracked)"
        )


def _faults(model: Model, sent: Arrays, replies: Sequence[FitRes]) -> list[str]:
    """Why each reply, with SecAgg+ the mean itself, cannot be used; nothing if it can."""
    faults = [_fault(sent, reply) for reply in replies]
    x = model.ravel(sent).double()
    fit = [i for i, fault in enumerate(faults) if not fault]
    weights = [float(replies[i].num_examples) for i in fit]
    for i, weight, most in zip(fit, weights, heaviest(weights), strict=True):
        if weight > most:
            faults[i] = f"its weight is more than {HEAVY:g} times the others'"
    fit = [i for i in fit if not faults[i]]
    lengths = [float((model.ravel(_named(replies[i].parameters)).double() - x).norm()) for i in fit]
    for i, length, most in zip(fit, lengths, farthest(lengths, float(x.norm())), strict=True):
        if not length <= most:
            faults[i] = (
                f"its update of length {length:.3g} is too long, at most {most:.3g} would do"
            )
    return faults


def _fault(sent: Arrays, reply: FitRes) -> str:
    if reply.num_examples <= 0:
        return f"num_examples is {reply.num_examples}, not positive"
    try:
        heads = [header(data) for data in reply.parameters.tensors]  # before anything is allocated
        if [shape for shape, _ in heads] != [array.shape for array in sent.values()]:
            return "its arrays have other shapes than the model's"
        if not all(
            holds(dtype, like) for (_, dtype), like in zip(heads, sent.values(), strict=True)
        ):
            return "its arrays do not hold real numbers"
        arrays = _named(reply.parameters)
    except Exception as error:  # whatever a client may have put there
        return f"its arrays cannot be read ({type(error).__name__})"
    if not all(_finite(array, sent[name]) for name, array in arrays.items()):
        return "it holds NaN or infinite numbers"
    return next(
        filter(None, (statistics.fault(name, array, sent[name]) for name, array in arrays.items())),
        "",
    )


def _finite(array: NDArray[Any], like: NDArray[Any]) -> bool:
    """Whether numbers are finite, in the model's type as well."""
    with np.errstate(over="ignore"):
        return bool(
            np.isfinite(array.astype(like.dtype) if like.dtype.kind == "f" else array).all()
        )

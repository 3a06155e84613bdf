"""FedSSO for secure aggregation (SecAgg+), which Flower offers to its earlier generation of strategies alone.

    strategy = LegacyFedSSO(eta_l=0.01, local_steps=5, min_fit_clients=4, min_available_clients=4)
    secure = SecAggPlusWorkflow(3, 2, max_weight=120.0, clipping_range=4.0, quantization_range=2**24)
    DefaultWorkflow(fit_workflow=secure)(grid, LegacyContext(context, ServerConfig(num_rounds=20), strategy))

The ClientApp is made with `mods=[secaggplus_mod]`. Of the models the server then sees nothing but the weighted
mean, and that is all FedSSO asks for; num_examples and metrics it sees as before.

Each of the n clients scales its model by w = num_examples / max_weight, cuts it to +-clipping_range and rounds it to
quantization_range levels. This leaves in the mean an error of about 2 clipping_range / quantization_range
sqrt(n / 6) / sum(w), which g holds divided by eta_l local_steps. So let max_weight be the largest num_examples, so
that w is near 1; clipping_range little more than the largest parameter in size; and quantization_range 2^24, beyond
which float32 gains nothing (float64: up to 2^30). n quantization_range must stay below modulus_range (2^32): beyond it
the sum wraps, and the model is wrong without any error. All arrays are cut alike, statistics of BatchNorm as well.

Nobody can look at one client's model, so nobody can refuse it: NaN becomes an arbitrary number on its way. A client
whose training failed must raise an error, which leaves it out of the round.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from inspect import signature
from typing import Any

import numpy as np
from flwr.common import FitIns, FitRes, Parameters, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

from ..errors import InputError, integer
from ..schedule import Step
from . import privacy
from .screen import farthest
from .settings import server, split, told
from .wire import Arrays, Model

log = logging.getLogger("flwr")
FEDAVG = tuple(signature(FedAvg).parameters)


class LegacyFedSSO(FedAvg):
    """Flower's earlier FedAvg, whose mean FedSSO makes a step of; it takes the fields of both as keywords.

    `buffers` are the positions of arrays that are averaged and never stepped (BatchNorm's running statistics);
    integers always are.
    """

    def __init__(
        self,
        *,
        eta_l: Step | None = None,
        local_steps: float | None = None,
        buffers: Collection[int] = (),
        **keywords: Any,
    ) -> None:
        values, options = split(keywords, ("eta_l", "local_steps", "buffers"), FEDAVG)
        super().__init__(**{"inplace": False, **options})  # in place, the mean of integers is 0
        self.server = server(eta_l, local_steps, values)
        self.buffers = [integer("each of buffers", i, 0) for i in buffers]
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
        """The next model and what its step knows of the curvature; no model where there is no usable mean."""
        model = Model(self.sent, [str(i) for i in self.buffers])
        faults = _faults(model, self.sent, [reply for _, reply in results])
        for fault in sorted({*faults} - {""}):
            log.warning("round %d: %d of %d replies dropped: %s", server_round, faults.count(fault), len(faults), fault)
        good = [pair for pair, fault in zip(results, faults, strict=True) if not fault]
        mean, metrics = super().aggregate_fit(server_round, good, failures)
        if mean is None:
            log.warning("round %d: %d usable replies, the model is kept", server_round, len(good))
            return None, {}
        arrays = _named(mean)
        x = self.server.step(model.ravel(self.sent), model.ravel(arrays), server_round)
        new = [array.numpy() for array in model.record(x, arrays).values()]
        return ndarrays_to_parameters(new), {**metrics, **told(self.server.diagnostics())}


def _named(parameters: Parameters) -> Arrays:
    """Arrays by their position."""
    return {str(i): array for i, array in enumerate(parameters_to_ndarrays(parameters))}


def _check(arrays: Arrays, buffers: list[int]) -> None:
    """Refuse positions that do not exist, and what SecAgg+ averages wrongly."""
    if any(i >= len(arrays) for i in buffers):
        raise InputError(f"buffers are positions among the model's {len(arrays)} arrays, from 0 on; got {buffers}")
    single = [name for name, array in arrays.items() if array.ndim == 0]
    if single:
        raise InputError(
            f"array {', '.join(single)} of the model is a single number without an axis, which Flower's SecAgg+ "
            "averages wrongly; send it with the shape (1,), or leave it out (BatchNorm's num_batches_tracked)"
        )


def _faults(model: Model, sent: Arrays, replies: Sequence[FitRes]) -> list[str]:
    """Why each reply, with SecAgg+ the mean itself, cannot be used; nothing if it can."""
    faults = [_fault(sent, reply) for reply in replies]
    x = model.ravel(sent).double()
    fit = [i for i, fault in enumerate(faults) if not fault]
    lengths = [float((model.ravel(_named(replies[i].parameters)).double() - x).norm()) for i in fit]
    for i, length, most in zip(fit, lengths, farthest(lengths, float(x.norm())), strict=True):
        if not length <= most:
            faults[i] = f"its update of length {length:.3g} is too long, at most {most:.3g} would do"
    return faults


def _fault(sent: Arrays, reply: FitRes) -> str:
    try:
        arrays = _named(reply.parameters)
    except Exception as error:  # whatever a client may have put there
        return f"its arrays cannot be read ({type(error).__name__})"
    if reply.num_examples <= 0:
        return f"num_examples is {reply.num_examples}, not positive"
    if [array.shape for array in arrays.values()] != [array.shape for array in sent.values()]:
        return "its arrays have other shapes than the model's"
    if any(array.dtype.kind not in "fiub" for array in arrays.values()):
        return "its arrays do not hold real numbers"
    if not all(np.isfinite(array).all() for array in arrays.values()):
        return "it holds NaN or infinite numbers"
    return ""

"""FedSSO for secure aggregation (SecAgg+), which Flower offers to its earlier strategies only.

    strategy = LegacyFedSSO(eta_l=0.01, local_steps=5, min_fit_clients=4, min_available_clients=4)
    secure = SecAggPlusWorkflow(
        3, 2, max_weight=120.0, clipping_range=4.0, quantization_range=2**24
    )
    workflow = DefaultWorkflow(fit_workflow=secure)
    workflow(grid, LegacyContext(context, ServerConfig(num_rounds=20), strategy))

The ClientApp is made with `mods=[secaggplus_mod]`. Of the models, the server then sees nothing but
their weighted mean, and that is all FedSSO needs. It still sees num_examples and the metrics.

How to choose the ranges. Each of the n clients scales its model by w = num_examples / max_weight,
cuts it to +-clipping_range and rounds it to quantization_range levels. This leaves an error in the
mean of about 2 clipping_range / quantization_range sqrt(n / 6) / sum(w), and g holds this error
divided by eta_l local_steps. So choose:

- max_weight as the largest num_examples, so that w is near 1,
- clipping_range as little more than the size of the largest parameter,
- quantization_range as 2^24, beyond which float32 gains nothing (float64: up to 2^30).

n quantization_range must stay below modulus_range (2^32). Beyond it the sum wraps around, and the
model is wrong without any error. All arrays are cut alike, also the statistics of BatchNorm.

Nobody can look at the model of one client, so nobody can refuse or clip it. NaN becomes an
arbitrary number on its way. A client whose training failed must raise an error, which leaves it out
of the round.
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

from ..algorithm.schedule import Step
from ..errors import InputError, integer
from ..server import Server
from . import bounds, privacy, statistics
from .bounds import Clip, checked
from .screen import HEAVY, farthest, header, heaviest, holds, scales_of, told_moves
from .settings import join_logs, loss, server, split, told
from .wire import Arrays, Model, Values

log = logging.getLogger("flwr")

OWN = ("eta_l", "local_steps", "buffers", "clip", "loss_key")
"""The keywords that the strategy takes itself."""
FEDAVG = tuple(signature(FedAvg).parameters)
"""The keywords of Flower's earlier FedAvg."""
Replies = list[tuple[ClientProxy, FitRes]]


class LegacyFedSSO(FedAvg):
    """Flower's earlier FedAvg, from whose mean FedSSO makes a step.

    Args:
        eta_l: The size of the clients' local steps. It must be what the clients use.
        local_steps: The number of local steps that clients make in a round.
        buffers: The positions of arrays that are averaged and never stepped, such as the running
            statistics of BatchNorm. Arrays of integers are always treated so.
        clip: What bounds the influence of one reply, where replies can be seen. None does not bound
            it.
        **keywords: The fields of `fedsso.FedSSO`, and the keywords of the earlier FedAvg. There is
            no memory of clients: memory="auto" means "none" here, "clients" is refused.

    >>> strategy = LegacyFedSSO(eta_l=0.01, local_steps=5, min_fit_clients=4)
    >>> strategy.min_fit_clients
    4
    """

    server: Server
    """FedSSO's server: it makes the step, and keeps the curvature."""
    buffers: list[int]
    """The positions of arrays that are averaged and never stepped."""
    clip: Clip | None
    """What bounds the influence of one reply."""
    sent: Arrays
    """The model of the round, x_k, by the positions of its arrays."""

    def __init__(
        self,
        *,
        eta_l: Step | None = None,
        local_steps: float | None = None,
        buffers: Collection[int] = (),
        clip: Clip | None = Clip(),  # noqa: B008
        loss_key: str | None = None,
        **keywords: Any,
    ) -> None:
        join_logs()
        of_record, of_fedavg = split(keywords, OWN, FEDAVG)
        if of_record.get("memory") == "clients":
            raise InputError(
                "memory='clients' needs what each client sent; LegacyFedSSO is for secure "
                "aggregation, which hides that: use memory='none', or fedsso.flower.FedSSO"
            )
        # In place, Flower's mean of integers would be 0.
        super().__init__(**{"inplace": False, **of_fedavg})
        self.server = server(eta_l, local_steps, of_record)
        self.buffers = [integer("each of buffers", position, 0) for position in buffers]
        self.clip = checked(clip)
        self.loss_key = loss_key
        self.sent = {}

    def configure_fit(
        self,
        server_round: int,
        parameters: Parameters,
        client_manager: ClientManager,
    ) -> list[tuple[ClientProxy, FitIns]]:
        """FedAvg's instructions. The model that is sent is x_k.

        It is kept until the replies arrive, because FedSSO's step begins there.
        """
        privacy.refuse_outside()
        self.sent = _named(parameters)
        _check_model(self.sent, self.buffers)
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Make FedSSO's step from the mean of the replies.

        Returns the new model and the metrics, or no model if there is no usable mean.
        """
        model = Model(self.sent, [str(position) for position in self.buffers])
        good = self._usable(server_round, results, model)
        good, clipped = self._bounded(good, model)
        for line in clipped:
            log.warning("round %d: a reply clipped: %s", server_round, line)
        mean, metrics = super().aggregate_fit(server_round, good, failures)
        if mean is None:
            log.warning("round %d: %d usable replies, the model is kept", server_round, len(good))
            return None, {}
        arrays = _named(mean)
        before = model.ravel(self.sent)
        v = model.ravel(arrays)
        self.server.fit(model.layout)
        x = self.server.step(before, v, server_round, loss(metrics, self.loss_key))
        new = [array.numpy() for array in model.record(x, arrays).values()]
        numbers = {
            **self.server.diagnostics(),
            "dropped": float(len(results) - len(good)),
            "clipped": float(len(clipped)),
        }
        return ndarrays_to_parameters(new), {**metrics, **told(numbers)}

    def _usable(self, server_round: int, results: Replies, model: Model) -> Replies:
        """The replies that can be used. The log tells why the others cannot."""
        faults = _faults(model, self.sent, [reply for _, reply in results])
        for fault in sorted({*faults} - {""}):
            log.warning(
                "round %d: %d of %d replies dropped: %s",
                server_round,
                faults.count(fault),
                len(faults),
                fault,
            )
        return [pair for pair, fault in zip(results, faults, strict=True) if not fault]

    def _bounded(self, good: Replies, model: Model) -> tuple[Replies, list[str]]:
        """Bound the replies, so that none counts many times more than the others.

        With SecAgg+ there is nothing to compare, because all replies are the mean.

        Returns:
            The replies, and for each one that was clipped a line for the log.
        """
        replies = [reply for _, reply in good]
        if self.clip is None or _are_secret(replies):
            return good, []
        arrays = [_named(reply.parameters) for reply in replies]
        lengths = [bounds.moves(one, self.sent, model.kinds) for one in arrays]
        scales = scales_of(lengths, model.kinds, self.clip)
        weights = [float(reply.num_examples) for reply in replies]
        heavy = bounds.factors(weights, self.clip.weight)
        lines = []
        for i, (proxy, reply) in enumerate(good):
            factor = heavy[i]
            parts = []
            if factor < 1:
                parts.append(bounds.told("weight", weights[i], factor))
            moved = told_moves(lengths[i], scales[i])
            if moved:
                parts.append(moved)
            if not parts:
                continue
            lines.append("; ".join(parts))
            near = bounds.shortened(
                arrays[i],
                self.sent,
                model.kinds,
                scales[i],
            )
            count = int(weights[i] * factor)
            lighter = replace(
                reply,
                parameters=ndarrays_to_parameters(list(near.values())),
                num_examples=max(1, count),
            )
            good[i] = (proxy, lighter)
        return good, lines


def _are_secret(replies: Sequence[FitRes]) -> bool:
    """Whether every reply holds the mean itself, as with SecAgg+."""
    tensors = [reply.parameters.tensors for reply in replies]
    return all(own == tensors[0] for own in tensors)


def _named(parameters: Parameters) -> Arrays:
    """Arrays, named by their positions."""
    arrays = parameters_to_ndarrays(parameters)
    return {str(position): array for position, array in enumerate(arrays)}


def _check_model(arrays: Arrays, buffers: list[int]) -> None:
    """Raise InputError for positions that do not exist, and for what SecAgg+ averages wrongly."""
    count = len(arrays)
    if any(position >= count for position in buffers):
        raise InputError(
            f"buffers are positions among the model's {count} arrays, from 0 on; got {buffers}"
        )
    single = [name for name, array in arrays.items() if array.ndim == 0]
    if single:
        raise InputError(
            f"array {', '.join(single)} of the model is a single number without an axis, which "
            "Flower's SecAgg+ averages wrongly; send it with the shape (1,), or leave it out "
            "(BatchNorm's num_batches_tracked)"
        )


# ---- which replies can be used ----


def _faults(model: Model, sent: Arrays, replies: Sequence[FitRes]) -> list[str]:
    """For each reply, why it cannot be used. Empty if it can.

    With SecAgg+, every reply is the mean itself.
    """
    faults = [_fault(sent, reply) for reply in replies]
    _find_heavy(replies, faults)
    _find_far(model, sent, replies, faults)
    return faults


def _fit(faults: Sequence[str]) -> list[int]:
    """The places of the replies that have no fault so far."""
    return [place for place, fault in enumerate(faults) if not fault]


def _find_heavy(replies: Sequence[FitRes], faults: list[str]) -> None:
    """Note the weights that are absurd beside the others', in `faults`.

    Replies that have a fault already are not compared with.
    """
    fit = _fit(faults)
    weights = [float(replies[place].num_examples) for place in fit]
    allowed = heaviest(weights)
    for place, weight, most in zip(fit, weights, allowed, strict=True):
        if weight > most:
            faults[place] = f"its weight is more than {HEAVY:g} times the others'"


def _find_far(
    model: Model,
    sent: Arrays,
    replies: Sequence[FitRes],
    faults: list[str],
) -> None:
    """Note the updates that are absurdly long beside the others', in `faults`.

    An update is the difference between a reply's parameters and those that were sent.
    """
    x = model.ravel(sent).double()
    fit = _fit(faults)
    lengths = []
    for place in fit:
        own = model.ravel(_named(replies[place].parameters)).double()
        lengths.append(float((own - x).norm()))
    bound = farthest(lengths, float(x.norm()))
    for place, length, most in zip(fit, lengths, bound, strict=True):
        if not length <= most:
            too_long = f"its update of length {length:.3g} is too long"
            faults[place] = f"{too_long}, at most {most:.3g} would do"


def _fault(sent: Arrays, reply: FitRes) -> str:
    """Why one reply, looked at alone, cannot be used. Empty if it can.

    Its headers are read first, because they can tell of any size. Then its arrays are read, and
    must be finite. Last come the statistics of BatchNorm.
    """
    if reply.num_examples <= 0:
        return f"num_examples is {reply.num_examples}, not positive"
    try:
        fault = _wrong_header(sent, reply)  # before anything is allocated
        if fault:
            return fault
        arrays = _named(reply.parameters)
    except Exception as error:  # whatever a client may have put there
        return f"its arrays cannot be read ({type(error).__name__})"
    for name, array in arrays.items():
        if not _is_finite(array, sent[name]):
            return "it holds NaN or infinite numbers"
    for name, array in arrays.items():
        fault = statistics.fault(name, array, sent[name])
        if fault:
            return fault
    return ""


def _wrong_header(sent: Arrays, reply: FitRes) -> str:
    """Why the shapes or types of a reply are wrong. Empty if they are right."""
    heads = [header(data) for data in reply.parameters.tensors]
    expected = list(sent.values())
    if [shape for shape, _ in heads] != [array.shape for array in expected]:
        return "its arrays have other shapes than the model's"
    for (_, dtype), like in zip(heads, expected, strict=True):
        if not holds(dtype, like):
            return "its arrays do not hold real numbers"
    return ""


def _is_finite(array: Values, like: Values) -> bool:
    """Whether numbers are finite, also in the model's type."""
    with np.errstate(over="ignore"):
        if like.dtype.kind == "f":
            array = array.astype(like.dtype)
        return bool(np.isfinite(array).all())

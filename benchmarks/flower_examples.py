"""FedSSO() beside FedAvg on Flower, with clients that do what those of two of its examples do.

    python -m benchmarks.flower_examples                        # all rows, hours on one core
    python -m benchmarks.flower_examples --examples quickstart --clients momentum --seeds 0

Strategies, ClientApps, messages and records are real; nodes answer within this process, or with
--simulation in Flower's own simulation, where replies come in any order.
quickstart-pytorch: CIFAR-10 over 10 nodes, all of which train; each node evaluates the model on a
fifth of its rows. advanced-pytorch: Fashion-MNIST over 20 nodes, of which half train in a round;
nodes keep a classification layer of their own and crop and flip their images, the learning rate is
halved in round 5, and the server evaluates the model. Only data loading and optimizer differ.

Every run is a small file below --out, and is not run again, so several processes may share the
work. At the end the table of what is there is printed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.simulation import run_simulation
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import fedsso
from fedsso.flower import FedSSO
from fedsso.support.files import write_atomic

from .clients import NETWORKS, TASKS, federation, first

LAST = 3  # evaluations that make the accuracy at the end
BATCH = 32
MOMENTUM = 0.9
OWN_RATE = {"sgd": 0.1, "momentum": 0.1, "adam": 0.001, "adamw": 0.001}
TIMES = (1 / 3, 1.0, 3.0)  # the rates that are tried, in units of the example's own
STRATEGIES = ("fedavg", "fedsso")
HEAD = "classification-layer"  # what a node keeps for itself
ONE_CORE: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
Rows: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Example:
    """How one of Flower's examples is set up."""

    task: str  # a name of `clients.TASKS`
    rounds: int
    fraction: float  # of the nodes that train in a round
    head: int = 0  # how many of the last arrays a node keeps for itself
    augments: bool = False
    halves_at: int = 0  # the round in which the learning rate is halved
    held_out: int = 0  # rows on which the server evaluates; 0: the nodes do, on their own


EXAMPLES = {
    "quickstart": Example("cifar", rounds=25, fraction=1.0),
    "advanced": Example(
        "fashion", rounds=30, fraction=0.5, head=2, augments=True, halves_at=5, held_out=2000
    ),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    example: str
    client: str
    rate: float
    seed: int
    strategy: str

    @property
    def file(self) -> str:
        return f"{self.example}-{self.client}-{self.rate:g}-{self.seed}-{self.strategy}.json"


# ---- the nodes ----


def client_app(case: Case) -> ClientApp:
    """The ClientApp of an example: one pass over a node's rows in every round."""
    app = ClientApp()
    example = EXAMPLES[case.example]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        x, y = _rows(example.task)[number][0]
        config = message.content.config_records["config"]
        network = _network(example, message, context)
        seed = 1_000_003 * case.seed + 1009 * number + int(config["server-round"])  # type: ignore[arg-type]
        draw = torch.Generator().manual_seed(seed)
        optimizer = _optimizer(case.client, network, float(config["lr"]))  # type: ignore[arg-type]
        loss = _train(network, optimizer, (x, y), draw, augments=example.augments)
        trained = network.state_dict()
        if example.head:
            kept = list(trained)[-example.head :]
            context.state[HEAD] = ArrayRecord({name: Array(trained[name]) for name in kept})
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        x, y = _rows(example.task)[int(context.node_config["partition-id"])][1]
        accuracy, loss = _accuracy(_network(example, message, context), x, y)
        metrics = MetricRecord({"accuracy": accuracy, "loss": loss, "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@cache
def _rows(task: str) -> list[tuple[Rows, Rows]]:
    """The training and the test rows of every node."""
    fed = federation(TASKS[task])
    nodes = []
    for i in range(fed.clients):
        train = fed.train_rows[fed.train_start[i] : fed.train_start[i + 1]]
        test = fed.test_rows[fed.test_start[i] : fed.test_start[i + 1]]
        nodes.append(((fed.x[train], fed.y[train]), (fed.x[test], fed.y[test])))
    return nodes


def _network(example: Example, message: Message, context: Context) -> nn.Module:
    """The server's model, with the node's own classification layer if it has one."""
    state = message.content.array_records["arrays"].to_torch_state_dict()
    if HEAD in context.state:
        state |= context.state.array_records[HEAD].to_torch_state_dict()
    network = NETWORKS[example.task]()
    network.load_state_dict(state)
    return network


def _train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    draw: torch.Generator,
    *,
    augments: bool,
) -> float:
    """One pass over the rows in batches; the mean loss on the way."""
    x, y = rows
    losses = []
    order = torch.randperm(len(y), generator=draw)
    for batch in torch.split(order, BATCH):
        images = _augmented(x[batch], draw) if augments else x[batch]
        loss = cross_entropy(network(images), y[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


def _optimizer(client: str, network: nn.Module, rate: float) -> torch.optim.Optimizer:
    """The optimizer that a client's name stands for."""
    weights = network.parameters()
    if client == "adam":
        return torch.optim.Adam(weights, lr=rate)
    if client == "adamw":
        return torch.optim.AdamW(weights, lr=rate)
    return torch.optim.SGD(weights, lr=rate, momentum=MOMENTUM if client == "momentum" else 0.0)


def _augmented(images: Tensor, draw: torch.Generator) -> Tensor:
    """Images moved by up to four pixels and, half of them, mirrored; -1 is black."""
    n, size = len(images), images.shape[-1]
    wide = pad(images, (4, 4, 4, 4), value=-1.0)
    down, right = torch.randint(9, (2, n, 1), generator=draw)
    mirrored = torch.rand(n, 1, generator=draw) < 0.5
    at = torch.arange(size)
    rows = down + at
    columns = right + torch.where(mirrored, at.flip(0), at)
    every = torch.arange(n)[:, None, None]
    return wide[every, :, rows[:, :, None], columns[:, None]].movedim(-1, 1)


def _accuracy(network: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy and loss."""
    with torch.no_grad():
        scores = network(x)
    right = scores.argmax(-1) == y
    return float(right.float().mean()), float(cross_entropy(scores, y))


# ---- the federation ----


class InProcess(Grid):
    """Nodes that answer at once, each with a context of its own."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app = app
        self.contexts = {}
        for i in range(nodes):
            self.contexts[100 + i] = Context(1, 100 + i, {"partition-id": i}, RecordDict(), {})

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002
    ) -> list[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(node)
            replies.append(self.app(message, self.contexts[node]))
        return sorted(replies, key=_metrics)

    def set_run(self, run: Any) -> None:
        """Nothing: there is one run."""

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *given: Any, **named: Any) -> Message:
        return Message(*given, **named)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # noqa: ARG002
        raise RuntimeError("nodes answer at once: use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # noqa: ARG002
        raise RuntimeError("nodes answer at once: use send_and_receive")


def _metrics(reply: Message) -> list[tuple[str, Any]]:
    """What replies are sorted by.

    FedSSO sorts them so, since a mean depends on the order of its terms. FedAvg takes them as they
    come; sorted alike, the two differ by their steps alone and not by rounding.
    """
    return sorted(reply.content.metric_records["metrics"].items())


class Averaging(FedAvg):
    """FedAvg with the learning rate of the example."""

    halves_at = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round == self.halves_at:
            config["lr"] = float(config["lr"]) / 2  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)


def _held_out(example: Example) -> tuple[Tensor, Tensor]:
    """Rows that no node has."""
    task = TASKS[example.task]
    pool = fedsso.load(task.data, clients=1, partition="iid")
    rows = slice(task.rows, task.rows + example.held_out)
    return pool.x[rows].float() / 127.5 - 1, pool.y[rows]


def run(case: Case, simulated: bool = False) -> list[float]:
    """The accuracy after every round, in this process or in Flower's own simulation."""
    curve: list[float] = []
    nodes = TASKS[EXAMPLES[case.example].task].clients
    app = client_app(case)
    if not simulated:
        return _serve(case, InProcess(app, nodes))
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        curve.extend(_serve(case, grid))

    run_simulation(server, app, num_supernodes=nodes, backend_config=ONE_CORE)
    return curve


def _serve(case: Case, grid: Grid) -> list[float]:
    """What the ServerApp of an example does: train, and return the accuracy after every round."""
    example = EXAMPLES[case.example]
    random.seed(case.seed)
    torch.manual_seed(case.seed)
    network = NETWORKS[example.task]()
    inner = Averaging(
        fraction_train=example.fraction,
        fraction_evaluate=0.0 if example.held_out else 1.0,
        min_available_nodes=TASKS[example.task].clients,
    )
    inner.halves_at = example.halves_at
    strategy: Strategy = inner if case.strategy == "fedavg" else FedSSO(inner=inner)
    held_out = _held_out(example) if example.held_out else None

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:  # noqa: ARG001
        if held_out is None:
            return None
        network.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": _accuracy(network, *held_out)[0]})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network.state_dict()),
        num_rounds=example.rounds,
        train_config=ConfigRecord({"lr": case.rate}),
        evaluate_fn=evaluate,
    )
    metrics = result.evaluate_metrics_serverapp if held_out else result.evaluate_metrics_clientapp
    return [float(metrics[k]["accuracy"]) for k in range(1, example.rounds + 1)]  # type: ignore[arg-type]


# ---- the table ----


def rates(client: str) -> list[float]:
    """The rates that are tried, to two digits."""
    return [float(f"{OWN_RATE[client] * factor:.2g}") for factor in TIMES]


def table(out: Path, examples: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    """Rows in Markdown: accuracies at the end, and the rounds to FedAvg's."""
    yield "| example | clients | lr | seeds | FedAvg | FedSSO() | rounds: FedAvg | FedSSO() |"
    yield "|---|---|---|---|---|---|---|---|"
    for example in examples:
        for client in OWN_RATE:
            for rate in rates(client):
                line = _line(out, example, client, rate, seeds)
                if line:
                    yield line


def _line(out: Path, example: str, client: str, rate: float, seeds: Sequence[int]) -> str:
    ends: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    rounds: dict[str, list[str]] = {name: [] for name in STRATEGIES}
    for seed in seeds:
        files = [out / Case(example, client, rate, seed, name).file for name in STRATEGIES]
        if not all(file.is_file() for file in files):
            continue
        curves = [np.asarray(json.loads(file.read_text())) for file in files]
        goal = float(curves[0][-LAST:].mean())
        for name, curve in zip(STRATEGIES, curves, strict=True):
            ends[name].append(float(curve[-LAST:].mean()))
            k = first(curve, goal)
            rounds[name].append("never" if k is None else str(k + 1))
    if not ends["fedavg"]:
        return ""
    cells = [example, client, f"{rate:g}", str(len(ends["fedavg"]))]
    for values in ends.values():
        cells.append(f"{np.mean(values):.3f} ({', '.join(f'{v:.3f}' for v in values)})")
    cells += [", ".join(each) for each in rounds.values()]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flower_examples", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--examples", nargs="+", choices=list(EXAMPLES), default=list(EXAMPLES))
    parser.add_argument("--clients", nargs="+", choices=list(OWN_RATE), default=list(OWN_RATE))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("build/flower_examples"))
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates of the clients")
    parser.add_argument("--simulation", action="store_true", help="run in Flower's simulation")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed in given.seeds if not given.table else ():
        for example in given.examples:
            for client in given.clients:
                for rate in given.rates or rates(client):
                    for name in STRATEGIES:
                        case = Case(example, client, rate, seed, name)
                        file = given.out / case.file
                        if not file.is_file():
                            write_atomic(file, json.dumps(run(case, given.simulation)))
    for text in table(given.out, given.examples, given.seeds):
        print(text)


if __name__ == "__main__":
    main()

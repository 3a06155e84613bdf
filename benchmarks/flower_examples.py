"""FedSSO() beside FedAvg on Flower, with clients that do what those of two of its examples do.

    python -m benchmarks.flower_examples                        # all rows, hours on one core
    python -m benchmarks.flower_examples --examples quickstart --clients momentum --seeds 0

The strategies are the real ones, and so are messages and records; nodes answer within this process.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
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


class Node:
    """A client of FedAvg: one pass over its rows in every round."""

    def __init__(self, case: Case, number: int, rows: tuple[Tensor, Tensor]) -> None:
        self.case = case
        self.example = EXAMPLES[case.example]
        self.number = number
        self.x, self.y = rows
        self.network = NETWORKS[self.example.task]()
        self.head: dict[str, Tensor] = {}

    def train(self, state: dict[str, Tensor], rate: float, k: int) -> tuple[ArrayRecord, float]:
        """The trained model, and the mean loss on the way."""
        self.network.load_state_dict({**state, **self.head})
        draw = torch.Generator().manual_seed(1_000_003 * self.case.seed + 1009 * self.number + k)
        optimizer = _optimizer(self.case.client, self.network, rate)
        losses = []
        order = torch.randperm(len(self.y), generator=draw)
        for rows in torch.split(order, BATCH):
            images = self.x[rows]
            if self.example.augments:
                images = _augmented(images, draw)
            loss = cross_entropy(self.network(images), self.y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        trained = self.network.state_dict()
        for name in list(trained)[len(trained) - self.example.head :]:
            self.head[name] = trained[name].clone()
        return ArrayRecord(trained), float(np.mean(losses))


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


class Federation(Grid):
    """Nodes that answer at once."""

    def __init__(self, case: Case) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.example = EXAMPLES[case.example]
        fed = federation(TASKS[self.example.task])
        self.nodes: dict[int, Node] = {}
        self.tests: dict[int, tuple[Tensor, Tensor]] = {}
        for i in range(fed.clients):
            train = fed.train_rows[fed.train_start[i] : fed.train_start[i + 1]]
            test = fed.test_rows[fed.test_start[i] : fed.test_start[i + 1]]
            self.nodes[100 + i] = Node(case, i, (fed.x[train], fed.y[train]))
            self.tests[100 + i] = fed.x[test], fed.y[test]
        self.k = 0

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002
    ) -> list[Message]:
        asked = list(messages)
        if asked and asked[0].metadata.message_type == "train":
            self.k += 1
        return sorted([self._answer(message) for message in asked], key=_metrics)

    def _answer(self, message: Message) -> Message:
        number = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = f"{self.k}-{number}"
        node = self.nodes[number]
        state = message.content.array_records["arrays"].to_torch_state_dict()
        if message.metadata.message_type == "train":
            rate = float(message.content.config_records["config"]["lr"])  # type: ignore[arg-type]
            arrays, loss = node.train(state, rate, self.k)
            metrics = MetricRecord({"train_loss": loss, "num-examples": len(node.y)})
            content = RecordDict({"arrays": arrays, "metrics": metrics})
            return Message(content, reply_to=message)
        node.network.load_state_dict(state)
        accuracy, loss = _accuracy(node.network, *self.tests[number])
        count = len(self.tests[number][1])
        metrics = MetricRecord({"accuracy": accuracy, "loss": loss, "num-examples": count})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

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


def run(case: Case) -> list[float]:
    """The accuracy after every round."""
    example = EXAMPLES[case.example]
    random.seed(case.seed)
    torch.manual_seed(case.seed)
    network = NETWORKS[example.task]()
    grid = Federation(case)
    inner = Averaging(
        fraction_train=example.fraction,
        fraction_evaluate=0.0 if example.held_out else 1.0,
        min_available_nodes=len(grid.nodes),
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
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed in given.seeds if not given.table else ():
        for example in given.examples:
            for client in given.clients:
                for rate in rates(client):
                    for name in STRATEGIES:
                        case = Case(example, client, rate, seed, name)
                        file = given.out / case.file
                        if not file.is_file():
                            write_atomic(file, json.dumps(run(case)))
    for text in table(given.out, given.examples, given.seeds):
        print(text)


if __name__ == "__main__":
    main()

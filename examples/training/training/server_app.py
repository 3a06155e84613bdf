"""The server: FedSSO around the FedAvg that was there before, or FedAvg alone to compare."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

from fedsso import report
from fedsso.flower import FedSSO
from training import task

app = ServerApp()


class Averaging(FedAvg):
    """FedAvg that evaluates in the last round alone: every message costs a hospital the start of a
    Python process."""

    def __init__(self, last: int, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.last = last

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages in the last round alone.

        A resumed run goes on counting, so this is the last round of the whole.
        """
        return (
            super().configure_evaluate(server_round, arrays, config, grid)
            if server_round == self.last
            else []
        )


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, print the last losses, write what there is to keep."""
    config, strategy = context.run_config, _strategy(context.run_config)
    arrays, rounds = ArrayRecord({"w": Array(task.start())}), int(config["num-server-rounds"])
    if isinstance(strategy, FedSSO):
        arrays, rounds = strategy.resume(arrays) or arrays, strategy.rounds_left(rounds)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
    moved = strategy.moved if isinstance(strategy, FedSSO) else bool(result.train_metrics_clientapp)
    if rounds and not moved:
        raise RuntimeError(
            "no hospital's reply could be used in any round, so there is no model; the log says why"
        )
    _tell(result)
    if config["out"]:
        _write(Path(str(config["out"])), result, strategy)


def _strategy(config: UserConfig) -> FedAvg | FedSSO:
    """The strategy that the run config names."""
    if config["strategy"] not in ("fedsso", "fedavg"):
        raise ValueError(f"strategy must be fedsso or fedavg, got {config['strategy']!r}")
    least = int(config["min-nodes"])
    averaging = Averaging(
        last=int(config["num-server-rounds"]),
        min_train_nodes=least,
        min_evaluate_nodes=least,
        min_available_nodes=least,
    )
    if config["strategy"] == "fedavg":
        return averaging
    return FedSSO(
        guard="adaptive",  # these clients are known: a few small steps of plain SGD
        eta_l=float(config["alpha"]),
        local_steps=int(config["local-steps"]),
        inner=averaging,
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
    )


def _tell(result: Result) -> None:
    """Print the last losses."""
    for metrics in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        for record in list(metrics.values())[-1:]:
            print(", ".join(f"{name} {record[name]:.4f}" for name in record if name.isidentifier()))


def _write(folder: Path, result: Result, strategy: FedAvg | FedSSO) -> None:
    """The model by feature and, of FedSSO, the trace."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = zip((*task.SCALES, "intercept"), result.arrays["w"].numpy().tolist(), strict=True)
    (folder / "model.csv").write_text(
        "".join(f"{name},{value}\n" for name, value in weights), encoding="utf-8"
    )
    if isinstance(strategy, FedSSO):
        strategy.trace.save(folder / "trace.csv")
        report.plot(
            [strategy.curve("FedSSO")],
            folder / "curves.png",
            title="Heart disease over the hospitals",
        )

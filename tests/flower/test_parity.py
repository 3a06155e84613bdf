"""The same problem on Flower and in the simulator: losses and model agree."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid import LocalGrid

import parity_problem as problem
from fedsso.flower import FedSSO

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """A torch client as in Flower's templates, with full batches."""
    net, (x, y) = problem.Net(), problem.clients()[int(context.node_config["partition-id"])]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=problem.ALPHA)
    for _ in range(problem.TAU):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], y).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(RecordDict(content), reply_to=message)


def vector(arrays: ArrayRecord) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in arrays.to_torch_state_dict().values()])


def test_flower_is_the_simulator() -> None:
    losses = []

    def central(_: int, arrays: ArrayRecord) -> MetricRecord:
        losses.append(problem.global_loss(vector(arrays)))
        return MetricRecord({"loss": losses[-1]})

    grid = LocalGrid(app, [{"partition-id": i} for i in range(len(problem.ROWS))])
    strategy = FedSSO(eta_l=problem.ALPHA, local_steps=problem.TAU, fraction_evaluate=0.0)
    start = ArrayRecord(problem.Net().state_dict())
    result = strategy.start(grid, start, num_rounds=problem.ROUNDS, evaluate_fn=central)
    expected, x = problem.simulate()
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(expected), rtol=0, atol=problem.SINGLE
    )
    torch.testing.assert_close(vector(result.arrays), x, rtol=0, atol=problem.SINGLE)
    assert expected[-1] < 0.9 * expected[0]

"""FedSSO in pfl: its FederatedAveraging with ServerBFGS as central optimizer, beside fedsso's own
simulator.

Half of the rounds are run by one model object, which is saved, and half by another, which loads it.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from table import compare
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import parity_problem as problem
from fedsso.optim import ServerBFGS


class Net(problem.Net):
    """The model with what pfl asks of one."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self(x).squeeze(-1), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Models(TrainingProcessCallback):
    """Notes the model after each round."""

    def __init__(self) -> None:
        self.seen = [problem.initial()]

    def after_central_iteration(
        self,
        aggregate_metrics: Metrics,  # noqa: ARG002
        model: PyTorchModel,
        *,
        central_iteration: int,  # noqa: ARG002
    ) -> tuple[bool, Metrics]:
        x = torch.nn.utils.parameters_to_vector(model.pytorch_model.parameters())
        self.seen.append(x.detach().clone())
        return False, Metrics()


def build() -> PyTorchModel:
    net = Net()
    return PyTorchModel(
        net, torch.optim.SGD, ServerBFGS(net.parameters(), problem.ALPHA, problem.TAU)
    )


def train(model: PyTorchModel, rounds: int, models: Models) -> None:
    pairs = [(x.numpy(), y.numpy()) for x, y in problem.clients()]
    users = FederatedDataset(
        lambda i: Dataset(pairs[i]), MinimizeReuseUserSampler(range(len(pairs)))
    )
    backend = SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()])
    settings = NNAlgorithmParams(
        rounds, evaluation_frequency=1, train_cohort_size=len(pairs), val_cohort_size=None
    )
    client = NNTrainHyperParams(
        local_batch_size=None, local_num_epochs=problem.TAU, local_learning_rate=problem.ALPHA
    )  # without a batch size an epoch is one step
    FederatedAveraging().run(
        settings, backend, model, client, callbacks=[models], send_metrics_to_platform=False
    )


def main() -> int:
    half, models = problem.ROUNDS // 2, Models()
    first, second = build(), build()
    train(first, half, models)
    with tempfile.TemporaryDirectory() as folder:
        first.save(folder)
        second.load(folder)
    train(second, problem.ROUNDS - half, models)
    return compare("pfl", models.seen)


if __name__ == "__main__":
    sys.exit(main())

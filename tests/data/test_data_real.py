"""The real files: every data set that is there loads and trains; heart disease beside the pooled
fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedsso
from fedsso.data import DataSet, datasets

HERE = Path(__file__).parents[2]
needs_data = pytest.mark.skipif(
    not os.environ.get("FEDSSO_DATA"), reason="FEDSSO_DATA names no data folder"
)
FEATURES = {
    "shakespeare": (50, 65),
    "sentiment140": (1024,),
    "ijcnn1": (22,),
    "a9a": (123,),
    "phishing": (68,),
}
SMALL = [d for d in datasets() if d.name in {*FEATURES, "heart", "cifar10"}]


@pytest.mark.sample
@needs_data
@pytest.mark.parametrize("dataset", SMALL, ids=lambda d: str(d.name))
def test_a_data_set_loads_and_trains_each_of_its_models(dataset: DataSet) -> None:
    found = dataset.find()
    if found is None:
        pytest.skip(f"{dataset.name} is not in FEDSSO_DATA")
    fed = fedsso.load(dataset.name)
    assert len(fed.train_rows) + len(fed.test_rows) == found[0].rows
    assert fed.classes == dataset.classes
    assert fed.sample_shape == FEATURES.get(dataset.name, fed.sample_shape)
    for model in dataset.models if dataset.name != "cifar10" else ("mclr", "lenet"):
        runs = fedsso.compare(
            fed,
            model,
            [fedsso.FedAvg(alpha=0.01), fedsso.FedSSO(alpha=0.01)],
            rounds=2,
            local_steps=1,
            eval_every=2,
        )
        for run in runs:
            assert run.diverged is None
            assert run.trace["test_loss"][-1] < 2 * run.trace["test_loss"][0]


@needs_data
def test_shakespeare_has_the_papers_number_of_parameters() -> None:
    fed = fedsso.load("shakespeare")
    assert (fed.clients, fed.source["partition"]) == (10, "contiguous")
    run = fedsso.simulate(fed, "mclr", fedsso.FedAvg(alpha=0.1), rounds=1, local_steps=1)
    assert run.x.numel() == 211_315
    speakers = fedsso.load("shakespeare", partition="group", min_rows=50)
    assert "GLOUCESTER" in speakers.client_names


MEASURE = """
import json, resource, time
import fedsso
raw = 70000 * 784
usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fedsso.load("digits", clients=2)
before = usage()
fed = fedsso.load("mnist")
print(json.dumps({"ratio": (usage() - before) * 1024 / raw, "clients": fed.clients}))
"""


@pytest.mark.full
@needs_data
def test_mnist_loads_in_twice_its_bytes() -> None:
    """In a process of its own: the most memory that this one has ever used would hide what loading
    takes."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["clients"] == 20
    assert found["ratio"] < 2


@pytest.mark.full
@needs_data
def test_heart_disease_reaches_the_pooled_fit() -> None:
    done = subprocess.run(
        [sys.executable, HERE / "examples" / "heart.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("split ")]
    rounds = [int(line.partition("FedSSO in round ")[2].partition(",")[0]) for line in lines]
    assert len(rounds) == 5
    assert max(rounds) <= 12
    assert all(name in done.stdout for name in ("cleveland", "hungarian", "switzerland", "va"))


@needs_data
def test_heart_rows_are_prepared_by_the_training_rows() -> None:
    fed = fedsso.load("heart", seed=3)
    train = fed.x[fed.train_rows].double()
    torch.testing.assert_close(train.mean(0), torch.zeros(13).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        train.std(0, correction=0), torch.ones(13).double(), rtol=0, atol=1e-6
    )
    assert fed.scaling is not None
    patient = [
        [63.0, 1, 4, 140, 260, 0, 1, 112, 1, 3, 2, float("nan"), float("nan")]
    ]  # the first row of va
    known = fed.x[(fed.x - fed.scaling(torch.tensor(patient))).abs().amax(1) < 1e-6]
    assert len(known) == 1

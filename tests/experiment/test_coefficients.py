"""The coefficients of linear models: the names of the table, and its own units."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedsso
from fedsso.errors import InputError
from fedsso.experiment.coefficients import coefficients

EPS = torch.finfo(torch.float32).eps
COLUMNS = ("age", "dose", "sex")


def table(classes: int) -> tuple[fedsso.Federation, torch.Tensor]:
    """A standardised federation of 30 rows with columns of very different size, and its rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3)) * [10, 0.01, 1] + [50, 0.1, 0]
    y = np.arange(30) % classes if classes else rng.normal(size=30)
    half = [(x[:15], y[:15]), (x[15:], y[15:])]
    fed = fedsso.Federation.from_clients(half, test_fraction=0, standardise=True)
    return fed.with_columns(COLUMNS, ("years", "mg", "")), torch.from_numpy(x)


def bound(weight: torch.Tensor, bias: torch.Tensor, z: torch.Tensor) -> float:
    """What rounding the standardised rows z to float32 can do to the outputs.

    Two outputs of 3 products and a bias are subtracted: 8 terms, of at most the largest size.
    """
    terms = z.abs().double() @ weight.abs().double().T + bias.abs().double()
    return 8 * EPS * float(terms.max())


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_the_outputs_are_those_of_the_model(outputs: int) -> None:
    """On rows as the table has them: intercept + x @ slopes."""
    fed, x = table(outputs if outputs > 1 else 0)
    torch.manual_seed(outputs)
    layer = nn.Linear(3, outputs)
    found = coefficients(nn.Sequential(nn.Flatten(), layer), fed)
    assert fed.scaling is not None
    z = fed.scaling(x)
    with torch.no_grad():
        out = layer(z).double()
        most = bound(layer.weight, layer.bias, z)
    expected = out if outputs == 1 else out[:, 1:] - out[:, :1]
    estimate = torch.tensor(found.estimate.to_numpy()).reshape(-1, 4)
    mine = x @ estimate[:, 1:].T + estimate[:, 0]
    assert (mine - expected).abs().max() <= most
    assert found.term.tolist() == ["(intercept)", *COLUMNS] * max(outputs - 1, 1)
    assert found.unit.tolist() == ["", "years", "mg", ""] * max(outputs - 1, 1)
    if outputs > 1:
        assert found["class"].tolist() == np.repeat(["1", "2"][: outputs - 1], 4).tolist()
    else:
        assert "class" not in found


def test_a_model_without_bias_has_an_intercept_only_from_the_scaling() -> None:
    fed, _ = table(0)
    assert fed.scaling is not None
    layer = nn.Linear(3, 1, bias=False)
    found = coefficients(layer, fed)
    slopes = layer.weight.detach()[0].double() * fed.scaling.factor
    expected = [-float(slopes @ fed.scaling.mean), *slopes.tolist()]
    assert np.allclose(found.estimate, expected, rtol=1e-12, atol=0)
    plain = fedsso.Federation.from_clients([([[1.0, 2.0]], [0.5])])
    assert coefficients(nn.Linear(2, 1, bias=False), plain).term.tolist() == ["x0", "x1"]


def test_bytes_of_images_are_the_units_of_images() -> None:
    """A model sees x * a + b; the coefficients are for x."""
    fed = fedsso.load("digits", clients=2, partition="iid")
    layer = nn.Linear(64, 10)
    found = coefficients(nn.Sequential(nn.Flatten(), layer), fed)
    factor, shift = fed.affine
    row = fed.x[0].flatten().double()
    with torch.no_grad():
        out = layer.double()(row * factor + shift)
    mine = found[found["class"] == "3"].estimate.to_numpy()
    assert np.isclose(mine[0] + mine[1:] @ row.numpy(), float(out[3] - out[0]), atol=1e-9)


def test_other_models_have_none() -> None:
    fed, _ = table(2)
    for model in (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), nn.Sequential(nn.Flatten())):
        with pytest.raises(InputError, match="train 'linear' or 'mclr'"):
            coefficients(model, fed)
    run = fedsso.simulate(fed, "mlp", "fedavg", rounds=1, device="cpu")
    with pytest.raises(InputError, match="only a linear model"):
        run.coefficients()


def test_a_run_tells_them_also_after_it_was_read_from_its_folder(tmp_path: Path) -> None:
    """y = 1.5 + 2 dose exactly, so that the fit has nothing to err about."""
    rows = "\n".join(f"{i / 4},{1.5 + i / 2}" for i in range(24))
    (tmp_path / "a.csv").write_text(f"dose,y\n{rows}\n")
    fed = fedsso.load("csv", files=tmp_path, outcome="y", task="regression", test_fraction=0)
    run = fedsso.simulate(fed, "mclr", "fedsso", rounds=30, device="cpu", out=tmp_path / "run")
    found = run.coefficients()
    assert found.term.tolist() == ["(intercept)", "dose"]
    assert np.allclose(found.estimate, [1.5, 2.0], atol=1e-3)
    again = fedsso.load_run(tmp_path / "run").coefficients()
    assert again.equals(found)
    assert found.to_csv(index=False).startswith("term,unit,estimate\n(intercept),,1.")

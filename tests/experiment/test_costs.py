"""What a round costs: measured without numbers, equal to what a real round sends and keeps, beside
the papers."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    from typer.testing import CliRunner

    from fedsso.cli.main import app

from fedsso import FedAvg, Federation, FedSSO, load
from fedsso.algorithm.records import hyper
from fedsso.algorithms import ALGORITHMS, make
from fedsso.engine.simulate import run
from fedsso.errors import InputError
from fedsso.experiment.costs import (
    META,
    ROWS,
    THEORY,
    Bill,
    Cost,
    Row,
    Size,
    Work,
    costs,
    measure,
)
from fedsso.experiment.stepper import Simulation
from fedsso.models import build
from fedsso.support.trees import nbytes

CLIENTS = 3
SCALARS = 64  # bytes of lengths, losses and counters, which no paper counts


LINEAR = ("nl1", "nl2", "bl1", "bl2", "bl3")  # for logistic regression with one output


def model_for(name: str) -> str:
    """FedPer needs layers to share and layers to keep."""
    return "mlp" if name == "fedper" else "mclr"


def one(name: str, model: str = "mclr", **options: Any) -> Row:
    (row,) = costs(model, [name], **options).rows
    return row


def measured(name: str, model: str = "mclr", **options: Any) -> Cost:
    row = one(name, model, **options)
    assert row.measured is not None, row.refused
    return row.measured


@pytest.fixture(scope="module")
def digits() -> Federation:
    return load("digits", clients=CLIENTS, concentration=100.0)


@pytest.fixture(scope="module")
def everything(digits: Federation) -> Bill:
    """All algorithms on the model of 650 parameters, FedPer on that of 2 410, those for one output
    on that of 65."""
    shape = {"sample": digits.sample_shape, "classes": 10}
    whole, layered = costs("mclr", **shape), costs("mlp", ["fedper"], **shape)
    single = costs("mclr", LINEAR, sample=digits.sample_shape, classes=1)
    others = ("fedper", *LINEAR)
    rows = [row for row in whole.rows if row.algorithm not in others]
    return whole._replace(rows=rows + layered.rows + single.rows)


@pytest.fixture(scope="module")
def table() -> Federation:
    """As wide as digits, with two classes and rows that span everything."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(CLIENTS * 100, 64, generator=draw)
    owners = [list(range(100 * i, 100 * (i + 1))) for i in range(CLIENTS)]
    return Federation.from_rows(rows, torch.arange(len(rows)) % 2, owners, classes=2)


# ---- numbers that are known ----


@pytest.mark.parametrize(
    ("model", "name", "total"),
    [
        ("mclr", "fedavg", 62_800),
        ("cnn", "fedavg", 49_840),
        ("mclr", "fedsso", 62_800),
        ("mclr", "scaffold", 125_600),
    ],
)
def test_bytes_of_the_papers_models(model: str, name: str, total: int) -> None:
    """d = 7 850 and 6 230 numbers of four bytes, down and up; SCAFFOLD sends two vectors each way,
    FedSSO with the model the client step that it has chosen."""
    found = measured(name, model)
    assert (found.down, found.up) == (total // 2 + 4 * (name == "fedsso"), total // 2)


def test_server_of_fedsso_to_the_byte() -> None:
    """x, g, s, 200 slots for two vectors and a copy of one of them: (3 + 402) d numbers of 4 bytes.

    In 8 bytes: two Gram matrices 200 x 200, 200 values cur, 2 counters, radius, gamma, slope and
    share, 5 diagnostics, the least steepness, the rounds undone; in 4 the client step; and 1 flag.
    For the metric of a weight of 10 x 784, in 8 bytes: its A and C, and the clients seen.
    """
    d, m = 7850, 200
    metric = 10**2 + 784**2 + 1
    assert (
        measured("fedsso").server
        == 4 * (3 + 2 * (m + 1)) * d + 8 * (2 * m * m + m + 2 + 4 + 5 + 2 + metric) + 4 + 1
    )


def test_compression_shortens_uploads_and_costs_the_client_a_vector() -> None:
    d = 7850
    plain = measured("fedavg")
    for text, up in (("int8", d + 4), ("topk:0.1", 785 * 8), ("rank:2", 4 * (2 * (10 + 784) + 10))):
        small = measured("fedavg", compress=text)
        assert small == plain._replace(up=up, client=4 * d), text
    assert measured("scaffold", compress="int8").client == 4 * d + 2 * 4 * d


def test_sample_classes_and_model_make_d() -> None:
    bill = costs("mlp", ["fedavg"], sample=(5, 2), classes=3)
    d = 10 * 32 + 32 + 32 * 3 + 3
    assert bill.d == d
    assert bill.rows[0].measured == Cost(1, 4 * d, 4 * d, 4 * d + 8, 0)


# ---- measured is real ----


def simulated(fed: Federation, name: str, compress: str | None) -> Cost:
    """Costs read off two rounds of the simulator."""
    full = {"rounds": 2, "batch_size": 20, "device": "cpu", "local_steps": 2, "compress": compress}
    if name in LINEAR:
        full["loss"] = "bce"
    sim = Simulation(fed, model_for(name), [make(name)], **full)
    run(sim, 2)
    # each way a lead exchange brings a vector to or from one client, which the costs leave out
    lead = 4 * sim.models().shape[-1] * sum(phase.lead for phase in sim.algorithm.phases)
    totals = (float(sim.rows[2][key][0]) - lead for key in ("bytes_down", "bytes_up"))
    down, up = (total / CLIENTS for total in totals)
    kept = nbytes(sim.own[0], 1) + nbytes(
        tuple(e for n, e in sim.errors.items() if n.endswith(".0")), 1
    )
    server, remembered = nbytes(sim.server, 1), nbytes(sim.now.memory[0], 1)
    return Cost(len(sim.algorithm.phases), down, up, server, kept, remembered)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_measured_equals_a_real_round(
    everything: Bill, digits: Federation, table: Federation, name: str
) -> None:
    (row,) = (row for row in everything.rows if row.algorithm == name)
    found = row.measured
    assert found is not None
    real = simulated(table if name in LINEAR else digits, name, None)
    if name == "mocha":  # keeps more with more clients and rows than one client with two rows
        real = real._replace(server=found.server, client=found.client)
    if name.startswith("nl"):  # a number for each row, of which a measurement has few
        more = int(table.train_sizes.max()) - ROWS
        real = real._replace(client=real.client - 4 * more)
    assert found == real


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fedavg", "rank:1"),
        ("scaffold", "topk:0.05"),
        ("giant", "int8"),
        ("fednl", "int8"),
        ("fedper", "rank:1"),
    ],
)
def test_measured_equals_a_real_compressed_round(digits: Federation, name: str, text: str) -> None:
    found = measured(name, model_for(name), sample=digits.sample_shape, classes=10, compress=text)
    assert found == simulated(digits, name, text)


# ---- theory ----

MORE = {  # vectors that server and client keep beyond the paper's
    "aide": (2, 0),  # the point of inner steps, and the gradient
    "fednew": (0, 1),  # the last model instead of a message with y
    "fednl": (-1, 0),  # the gradient is needed within the round only
    "fednl-pp": (0, -1),  # w_i is the last model: g_i is enough
}


@pytest.mark.parametrize("name", THEORY)
def test_measured_is_what_the_papers_count(everything: Bill, name: str) -> None:
    d = 2410 if name == "fedper" else 65 if name in LINEAR else everything.d
    bill = everything._replace(d=d)
    (row,) = (row for row in bill.rows if row.algorithm == name)
    assert row.theory is not None
    assert row.measured is not None
    expected, found = bill.in_bytes(row.theory), row.measured  # by costs.THEORY, and of the code
    assert (found.exchanges, found.up) == (expected.exchanges, expected.up)
    assert 0 <= found.down - expected.down <= SCALARS
    if name != "fedsso":  # see above
        server, client = (4 * bill.d * vectors for vectors in MORE.get(name, (0, 0)))
        assert 0 <= found.server - expected.server - server <= SCALARS
        assert 0 <= found.client - expected.client - client <= SCALARS
        assert found.per_client == expected.per_client


def test_all_algorithms_are_measured(everything: Bill) -> None:
    assert {row.algorithm for row in everything.rows if row.measured} == ALGORITHMS.keys()
    assert one("fedper").refused


def test_theory_names_registered_algorithms() -> None:
    assert THEORY.keys() <= ALGORITHMS.keys()


@pytest.mark.parametrize(
    ("size", "text", "value"),
    [
        (Size(), "0", 0),
        (Size(1), "d", 10),
        (Size(2, 1), "2d+1", 21),
        (Size(1, -3), "d-3", 7),
        (Size(0, 5), "5", 5),
        (Size(0, 1), "1", 1),
        (Size(403), "403d", 4030),
        (Size(1.5, dd=0.5), "0.5d²+1.5d", 65),
        (Size(-1, dd=1), "d²-d", 90),
    ],
)
def test_counts_as_text_and_number(size: Size, text: str, value: float) -> None:
    assert (str(size), size.at(10)) == (text, value)


def test_relative_units() -> None:
    """n_c = 8 d bytes, n_m = 4 d bytes."""
    bill = Bill(100, [])
    assert bill.relative(Cost(1, 400, 1200, 800, 400)) == {
        "round": 2.0,
        "server": 2.0,
        "client": 1.0,
    }
    assert bill.in_bytes(Cost(2, Size(1), Size(2, 1), Size(dd=1), Size())) == Cost(
        2, 400, 804, 40_000, 0
    )


# ---- what is refused or unknown ----


def test_a_model_that_is_too_large_is_refused_and_the_others_are_shown() -> None:
    bill = costs("mlp", ["fednl", "fedavg"])
    refused, shown = bill.rows
    assert refused.measured is None
    assert "25450 parameters" in refused.refused
    assert refused.theory is not None  # what it would cost
    assert bill.in_bytes(refused.theory).client == 4 * 25450**2
    assert shown.measured is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mclrr"}, "did you mean 'mclr'"),
        ({"algorithms": ["fedavgg"]}, "did you mean 'fedavg'"),
        ({"sample": (0, 3)}, "sample must be an integer >= 1, got sample=0"),
        ({"classes": 0}, "classes must be an integer >= 1"),
        ({"compress": "int9"}, "did you mean 'int8'"),
        ({"compress": "rank:10"}, r"shortens no parameter of this model \(10 x 784, 10\)"),
        ({"model": "cnn", "sample": (784,)}, "model 'cnn' needs images"),
    ],
)
def test_wrong_input_names_value_bound_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        costs(**options)


@hyper
class Stranger(FedAvg):
    """An algorithm that no paper counts."""


@pytest.mark.usefixtures("_stranger")
def test_an_algorithm_without_theory() -> None:
    row = one("stranger")
    assert row.theory is None
    assert row.measured == measured("fedavg")


@pytest.fixture
def _stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "stranger", Stranger)


# ---- the command ----


def command(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["costs", *args], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def test_command_prints_measured_above_theory() -> None:
    lines = command("--algorithms", "fedsso,fedavg").stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.strip().startswith("fedsso"))
    number = "18 276 765"  # to the byte, see above
    assert lines[at].split("  ")[0].strip() == "fedsso"
    assert "31 404   31 400      62 804" in lines[at]
    assert number in lines[at]
    numbers = "403d+1.22951e+06"  # two for each of A's and C's 10^2 + 784^2 in float64
    theory = ["1", "d", "d", "62", "800", "1.00", numbers, "560", "0", "0.00"]
    assert lines[at + 1].split() == theory
    assert lines[at + 2].strip().startswith("fedavg")


def test_command_shows_why_something_is_refused() -> None:
    out = command("--model", "mlp", "--algorithms", "fednl,fedavg").stdout
    assert "fednl: 25450 parameters need 25450 x 25450 matrices" in out


def test_command_tells_what_a_server_remembers_of_every_client() -> None:
    out = command("--algorithms", "fedvarp,fedavg").stdout
    assert "fedvarp: the server keeps 31 400 bytes (d numbers) more for each client" in out
    assert "fedavg:" not in out


@pytest.mark.parametrize(
    ("fields", "vectors"),
    [({}, 4), ({"alpha": 0.1}, 3), ({"guard": "cautious"}, 3), ({"guard": "none"}, 3)],
)
def test_fedsso_remembers_two_vectors_of_every_client_and_four_of_all(
    fields: dict[str, Any], vectors: int
) -> None:
    """And in 4 bytes whether the client is known, in 8 the mass, A, C, beta, rounds and m_o.

    The fourth vector is the mean of the clients' models, for the memory's own steps, which only the
    adaptive guard takes that chooses alpha.
    """
    d = 7850
    with META:
        model = build("mclr", (1, 28, 28), 10)
    with torch.no_grad():
        plain, found = (
            measure(FedSSO(memory=kind, **fields), model, Work((1, 28, 28), None))
            for kind in ("none", "clients")
        )
    assert found.per_client == 4 * (2 * d + 1)
    assert found.server - plain.server == 4 * vectors * d + 8 * 6
    assert found[:3] == plain[:3]


@pytest.mark.usefixtures("_stranger")
def test_command_shows_a_dash_without_theory() -> None:
    lines = command("--algorithms", "stranger").stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.strip().startswith("stranger"))
    assert lines[at + 1].split() == ["–"] * 9


def test_command_prints_json() -> None:
    wish = [
        "--model",
        "cnn",
        "--sample",
        "1,28,28",
        "--compress",
        "int8",
        "--algorithms",
        "fedsso,fedavg",
        "--json",
    ]
    found = json.loads(command(*wish).stdout)
    assert (found["model"], found["d"], found["sample"], found["compress"]) == (
        "cnn",
        6230,
        [1, 28, 28],
        "int8",
    )
    fedsso, fedavg = found["results"]
    assert fedsso["theory"]["formula"] == {
        "down": "d",
        "up": "d",
        "server": "403d+82804",
        "client": "0",
        "per_client": "0",
    }
    assert fedavg["measured"] == {
        "exchanges": 1,
        "down": 24_920,
        "up": 6_234,
        "server": 24_928,
        "client": 24_920,
        "per_client": 0,
        "relative": {"round": 31_154 / 49_840, "server": 24_928 / 24_920, "client": 1.0},
    }
    assert fedavg["theory"]["up"] == 24_920
    assert fedavg["refused"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--sample", "1,a"), "'a' is not a valid integer"),
        (("--algorithms", "fedavgg"), "did you mean 'fedavg'"),
        (("--compress", "topk:2"), "share in (0, 1]"),
        (("--model", "resnet"), "unknown model 'resnet'"),
    ],
)
def test_command_refuses_wrong_input(args: tuple[str, ...], message: str) -> None:
    assert message in command(*args, code=2).output

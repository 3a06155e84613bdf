"""What the documentation takes from the code is up to date, what it shows still comes out, and its
code runs."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import warnings
from dataclasses import fields
from functools import cache
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    import click
    from typer.main import get_command
    from typer.testing import CliRunner

    from fedsso.cli.main import app

import fedsso
from fedsso.algorithms import ALGORITHMS
from fedsso.data import all_options, datasets
from fedsso.experiment.costs import costs
from fedsso.support import exits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
ABSENT = [
    "FedPD",
    "FedCM",
    "pFedMe",
    "Per-FedAvg",
]


@cache
def module(path: str) -> ModuleType:
    """A script of the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "algorithms.md",
        "api.md",
        "datasets.md",
        "options.md",
        "robustness.md",
        "convex.md",
        "../results/README.md",
    ],
)
def test_the_tables_are_the_registrys(name: str) -> None:
    assert module("docs/build.py").page(name) == (ROOT / "docs" / name).read_text(), (
        "run `make docs`"
    )


def test_every_data_set_at_hand_was_tried_with_each_of_its_models() -> None:
    """All but the two whose official files could not be had."""
    found = json.loads((ROOT / "docs" / "smoke.json").read_text())
    asked = {f"{d.name} {model}" for d in datasets() if not d.yours for model in d.models}
    assert {name.split()[0] for name in asked - found.keys()} == {
        "emnist_letters",
        "emnist_balanced",
    }
    assert found.keys() <= asked


def test_the_page_of_data_sets_has_a_row_for_each_option_and_who_takes_it() -> None:
    """Those of every data set are on the page of all options alone."""
    text = (ROOT / "docs" / "datasets.md").read_text()
    for option, owners in all_options().items():
        takes = ", ".join(f"`{owner}`" for owner in owners)
        row = rf"^\| `{option.name}` \|.*\| {re.escape(takes)} \| {re.escape(option.doc)} \|$"
        found = re.findall(row, text, re.MULTILINE)
        assert len(found) == (1 if owners else 0), option.name


def test_every_algorithm_has_a_row_with_its_paper() -> None:
    for name in ALGORITHMS:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 10
        assert '"' in cells[9], (
            f"{inspect.getsourcefile(ALGORITHMS[name])} begins with a citation, its title in "
            f"quotation marks; then `make docs`"
        )
        assert all(re.fullmatch(r"[-+.d²0-9]+", cell) for cell in (*cells[2:5], cells[6]))
        assert {cells[5], cells[8]} <= {"yes", "no"}


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_here_says_why(name: str) -> None:
    assert re.search(rf"^\| {name}[^|]*\| .{{20,}} \|$", PAGE, re.MULTILINE)


def test_every_algorithm_is_in_the_package() -> None:
    assert sorted(fedsso.algorithms.__all__) == sorted(cls.__name__ for cls in ALGORITHMS.values())
    assert all(getattr(fedsso, cls.__name__) is cls for cls in ALGORITHMS.values())


@pytest.mark.full
def test_where_algorithms_end_up() -> None:
    """The example of the docs: each reaches its point, and the points are far apart."""
    example = module("examples/fixed_points.py")
    fed, A, b = example.problem()
    points = {
        "minimiser": fed.optimum,
        "FedAvg's fixed point": example.fixed_point(fed, A, b),
        "FedProx's fixed point": example.fixed_point(fed, A, b, example.MU),
    }
    assert torch.pdist(torch.stack(list(points.values()))).min() > 1e-3
    for name, (record, goal) in example.algorithms().items():
        run = fedsso.simulate(
            fed,
            "linear",
            record,
            rounds=example.ROUNDS,
            local_steps=example.TAU,
            batch_size=None,
            dtype="float64",
            device="cpu",
            eval_every=50,
        )
        assert (run.x - points[goal]).norm() < 1e-7, name


# ---- every block of code is run ----

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run: (.+?) -->\n+\Z")
PAGES = [
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")),
    "results/README.md",
]
ELSEWHERE = {"docs/faq.md"}  # test_faq.py runs it
RUN, READ = {"python", "sh", "toml"}, {"", "math"}
MARKED = {
    "docs/flower.md": 1,
    "docs/frameworks.md": 2,
}  # how many blocks say `<!-- not run: why -->`
OTHERS = {
    "pip": "installs",
    ".venv/bin/python": "runs the campaign, which test_campaign.py does",
    "export": "sets a variable of the shell",
    "source": "sets variables of the shell",
    "ssh-keygen": "writes keys",
    "flower-superlink": "a server",
    "flower-supernode": "a server",
    "flwr": "needs a server",
    "examples/hospitals/deploy.sh": "takes minutes, tests_deploy runs it",
    "torchrun": "starts processes, test_ranks.py does",
}
OWN_TABLES = ("README.md", "docs/start.md", "docs/regression.md")  # pages that make their own
PARSED = (("data", "get"), ("paper",))  # a download, minutes: only read by the command line
TRAINING, ROUNDS = ("run", "compare", "sweep", "tune"), 2
MANY = re.compile(r"(?<=rounds=)\d{2,3}|(?<=rounds_left\()\d{2,3}")


class Block(NamedTuple):
    language: str
    text: str
    mark: str  # why it is not run


def blocks(page: str) -> list[Block]:
    """The blocks of code of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        mark = MARK.search(text[: match.start()])
        found.append(Block(match[2], textwrap.dedent(match[3]), mark[1] if mark else ""))
    return found


def test_blocks_are_of_known_languages_and_few_are_marked() -> None:
    marked = {}
    for page in PAGES:
        found = blocks(page)
        assert {block.language for block in found} <= RUN | READ, page
        if count := sum(bool(block.mark) for block in found):
            marked[page] = count
    assert marked == MARKED


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p not in ELSEWHERE and any(b.language in RUN for b in blocks(p))]
)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, Python in one namespace, all in one folder with a few tables in it."""
    monkeypatch.chdir(tmp_path)
    if page not in OWN_TABLES:
        tables(tmp_path)
    if page == "docs/papers.md":
        monkeypatch.setitem(sys.modules, "wandb", Wandb("wandb"))
    space = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", space)
    space.__dict__.update(given(page))
    told = ""
    with patch.dict(ALGORITHMS):
        for block in blocks(page):
            if block.mark:
                continue
            if block.language == "python":
                exec(compile(shortened(block.text, tmp_path), page, "exec"), space.__dict__)
            elif block.language == "sh":
                for line in commands(block.text):
                    told = perform(line)
            elif not block.language and page == "docs/regression.md":
                compare(block.text, told)
            elif block.language == "toml":
                assert tomllib.loads(block.text)
        if page == "docs/flower.md":  # its server app and client app, together
            grid = module("tests/flower/grid.py").LocalGrid(
                space.app, [{"partition-id": i} for i in range(3)], answered
            )
            space.main(grid, None)

        if page == "docs/papers.md":
            check_papers(tmp_path, space)


def test_the_readme_has_the_numbers_of_the_results() -> None:
    """Rounds as on the page of results, and the memory that `fedsso costs` counts."""
    readme = (ROOT / "README.md").read_text()
    told = dict(re.findall(r"(?m)^\| (Fed\w+)[^|]*\|[^|]*\| ([\d.]+) \|$", readme))
    results = (ROOT / "results" / "README.md").read_text()
    names, block = (
        re.search(rf"(?m)^\| {start}.*$", results) for start in ("block", "MNIST, 20 clients, MCLR")
    )
    assert names is not None
    assert block is not None
    found = dict(zip(names[0].split(" | "), block[0].split(" | "), strict=True))
    assert found["FedAdam"].split()[0] == told["FedAdam"]
    assert found["FedAvg"].split()[0] == told["FedAvg"]
    assert f"| FedSSO, the default | chosen by itself | {told['FedSSO']} (" in results
    bill = costs("mclr", ["fedsso"])
    kept = bill.rows[0].measured
    assert kept is not None
    models, megabytes = kept.server / (4 * bill.d), kept.server / 1e6  # float32
    assert f"{models:.0f} models ({megabytes:.0f} MB)" in readme


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_of_an_algorithm(name: str) -> None:
    """It says all that the code says, and its two calls run."""
    build = module("docs/build.py")
    text = build.algorithm_page(name)
    for field in fields(ALGORITHMS[name]):
        assert f"| `{field.name}` |" in text
    assert f"class {ALGORITHMS[name].__name__}(" in text
    assert "def client(" in text
    (shell,) = re.findall(r"```sh\n(.*?)\n```", text)
    (call,) = re.findall(r"```python\nimport fedsso\n\n(.*?)\n```", text)
    perform(shlex.split(f"{shell} --clients 3"))
    exec(
        call.replace('load("digits")', 'load("digits", clients=3)').replace(
            "rounds=20", "rounds=1"
        ),
        {"fedsso": fedsso},
    )


@pytest.mark.parametrize("name", ["trust_region", "client_step"])
def test_the_page_of_fedsso_shows_what_is_not_in_the_paper(name: str) -> None:
    """Every paragraph of the two files beside Algorithm 1, below a heading, formulas in TeX; the
    line-by-line page names both."""
    text = module("docs/build.py").algorithm_page("fedsso")
    beside = importlib.import_module(f"fedsso.algorithms.{name}")
    end = text.index(f"The code is in [`src/fedsso/algorithms/{name}.py`]")
    heading, _, shown = text[:end].rpartition("\n## ")[2].partition("\n")
    assert heading.startswith(("The guard", "The client step"))
    told = re.sub(r"(?s)```.*?```", "", shown)
    words = unescape(re.sub(r"\\(?=\W|_)", "", told)).split()
    paragraphs = str(beside.__doc__).strip().split("\n\n")
    assert words == " ".join(p for p in paragraphs if not p.startswith("  ")).split()
    assert shown.count("```") == 2 * sum(p.startswith("  ") for p in paragraphs)
    assert f"src/fedsso/algorithms/{name}.py" in (ROOT / "docs" / "fedsso.md").read_text()


def test_the_lines_of_the_paper_are_shown_with_their_code() -> None:
    build = module("docs/build.py")
    lines = {
        where: code
        for where, code, _ in build.cited((ROOT / "src/fedsso/algorithms/fedsso.py").read_text())
    }
    assert lines["Alg. 1, line 11"] == "`g = delta / (-alpha * tau)`"
    assert lines["Alg. 1, line 14"] == "`new = x + move`"
    assert [where.split()[-1] for where in lines] == ["4-8", "11", "12", "13", "14"]


def test_the_reference_has_every_public_name() -> None:
    from fedsso import flower

    text = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    wanted = {f"fedsso.{name}" for name in fedsso.__all__ if name != "__version__"}
    wanted |= {f"fedsso.flower.{name}" for name in flower.__all__}
    assert not wanted - listed, "in docs/api.md: `make docs` for an algorithm, else by hand"


# ---- what these tests share ----


def shortened(code: str, folder: Path) -> str:
    """Many rounds become a few, and a server's folder one that is here."""
    return MANY.sub(str(2 * ROUNDS), code).replace("/srv/", f"{folder}/")


def commands(text: str) -> list[list[str]]:
    """The lines of a block as words, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def compare(shown: str, told: str) -> None:
    """What a page shows is what its command prints, where a fit ends alike on every machine."""
    pairs = list(zip(shown.replace(",", " ").split(), told.replace(",", " ").split(), strict=True))
    assert pairs
    for one, other in pairs:
        if re.fullmatch(r"-?[\d.]+(e-?\d+)?", one):
            assert float(other) == pytest.approx(float(one), rel=1e-3), f"{one}, now {other}"
        else:
            assert one == other


def perform(words: list[str]) -> str:
    """Run a command of this package in this process, and an example; `make` without its work. Other
    programs must be known. What a command of this package prints."""
    program, *rest = words
    if program == "make":
        subprocess.run(["make", "-n", "-C", str(ROOT), *rest], check=True, capture_output=True)
    elif program == "python":
        subprocess.run([sys.executable, ROOT / rest[0], *rest[1:]], check=True)
    elif program != "fedsso":
        assert program in OTHERS, f"who runs `{shlex.join(words)}`?"
    elif any(rest[: len(start)] == list(start) for start in PARSED):
        parse(rest)
    elif missing := absent(rest):
        print(f"not run, since {missing} is not on this machine: {shlex.join(words)}")
    else:
        few = ["--rounds", str(ROUNDS)] if rest[0] in TRAINING else []  # the last one counts
        told = CliRunner().invoke(app, [*rest, *few], env={"COLUMNS": "200"})
        missed = (
            bool(few) and "--target" in rest and "missed: no setting reached" in told.stderr
        )  # in so few rounds
        assert told.exit_code == (exits.DIVERGED if missed else exits.FINISHED), (
            f"{shlex.join(words)}\n{told.output}"
        )
        return told.stdout
    return ""


def parse(words: list[str]) -> None:
    """Let the command line read a command, and go no further."""
    command: Any = get_command(app)
    context = command.make_context("fedsso", list(words))
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, list(words))
        context = command.make_context(name, list(words), parent=context)


def absent(words: list[str]) -> str:
    """The data set that a command needs and this machine lacks."""
    asked = words[words.index("--dataset") + 1] if "--dataset" in words else "digits"
    return "" if all(d.yours or d.present() for d in datasets() if d.name == asked) else asked


def tables(folder: Path) -> None:
    """Hospitals in a folder and beside it, the same as one table, an svmlight file and two shards:
    what the pages speak of."""
    ill = [int((i % 7 > 3) != (i % 11 == 0)) for i in range(40)]  # no column separates them
    rows = [f"{i % 7 + 0.5},{i % 2},{i % 5},{ill[i]}" for i in range(40)]
    (folder / "hospitals").mkdir()
    for name in ("hospitals/east", "hospitals/west", "north", "south"):
        (folder / f"{name}.csv").write_text(
            "\n".join(["age,sex,dose,outcome", *rows]), encoding="utf-8"
        )
    both = [f"{row},{name}" for name in ("east", "west") for row in rows]
    (folder / "all.csv").write_text(
        "\n".join(["age,sex,dose,outcome,hospital", *both]), encoding="utf-8"
    )
    svm = [f"{int(i % 7 > 3)} 1:{i % 7} 2:{i % 5}" for i in range(400)]
    (folder / "train.svm").write_text("\n".join(svm), encoding="utf-8")
    (folder / "shards").mkdir()
    x, y, owner = (np.arange(400.0).reshape(200, 2) % 7, np.arange(200) % 2, np.arange(200) % 10)
    for place in ("shards/NAME-0000.npy", "shards/NAME-0001.npy", "NAME.npy"):
        for name, array in (("x", x), ("y", y), ("client", owner)):
            np.save(folder / place.replace("NAME", name), array)


def given(page: str) -> dict[str, Any]:
    """The names that a page takes for granted: what its reader has."""
    if page == "docs/frameworks.md":
        from fedsso.optim import ServerBFGS

        model = nn.Linear(3, 1)
        moved = [(w, [p.detach() - w for p in model.parameters()]) for w in (0.25, 0.75)]
        loop = {"model": model, "answers": lambda _: moved, "rounds": 3}
        return {
            "ServerBFGS": ServerBFGS,
            "params": model.parameters(),
            "local_lr": 0.1,
            "local_steps": 5,
            **loop,
        }
    if page in ("README.md", "docs/flower.md"):
        return on_flower()
    return {"fedsso": fedsso} if page == "docs/datasets.md" else {}


class Wandb(ModuleType):
    """In place of the package wandb, which needs an account: remembers what is logged.

    As there, a run is a context, `log` takes numbers and a step, and no step is below the one
    before.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.logs: list[Wandb.Log] = []

    class Log:
        def __init__(self, options: dict[str, Any]) -> None:
            self.options = options
            self.rows: list[tuple[int, dict[str, Any]]] = []
            self.finished = False

        def log(self, row: dict[str, Any], step: int) -> None:
            assert not self.rows or step > self.rows[-1][0]
            self.rows.append((step, row))

        def finish(self) -> None:
            self.finished = True

        def __enter__(self) -> Wandb.Log:
            return self

        def __exit__(self, *_: object) -> None:
            self.finish()

    def init(self, **options: Any) -> Wandb.Log:
        assert options.keys() <= {"project", "name", "config", "reinit"}
        self.logs.append(Wandb.Log(options))
        return self.logs[-1]


def check_papers(folder: Path, space: Any) -> None:
    """The files of the page are there, and the logs have every row of the traces."""
    rounds = 2 * ROUNDS
    for name in ("table.tex", "table.md", "table.csv", "digits.html", "figure.pdf"):
        assert (folder / name).stat().st_size > 0, name
    alone, *others = space.wandb.logs
    assert [step for step, _ in alone.rows] == list(range(1, rounds + 1))
    assert {one.options["name"].split()[0] for one in others} == {"fedsso", "fedavg"}
    for one in others:
        assert [row["round"] for _, row in one.rows] == list(range(rounds + 1))
    assert all(one.finished and "test_accuracy" in one.rows[-1][1] for one in space.wandb.logs)
    assert list(folder.glob("logs/*/events.out.tfevents.*"))


def answered(reply: Any) -> Any:
    """A reply of a client that did its work."""
    assert reply.has_content(), reply.error
    return reply


def on_flower() -> dict[str, Any]:
    """A federation of three clients inside this process, with a client app as a user of Flower
    writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Flower's dependencies deprecate
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
    local_grid = module("tests/flower/grid.py").LocalGrid
    clients = ClientApp()

    def net() -> nn.Module:
        return nn.Linear(64, 10)

    @clients.train()
    def train(message: Any, context: Any) -> Any:
        model = net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = rows(context)
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(x), y)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.01 * g
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
            reply_to=message,
        )

    @clients.evaluate()
    def evaluate(message: Any, context: Any) -> Any:
        metrics = MetricRecord({"eval_acc": 0.5, "num-examples": len(rows(context)[1])})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    fed = fedsso.load("digits", clients=3, seed=0)

    def rows(context: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = fed.rows_of(int(context.node_config["partition-id"]))
        return fed.x[own].flatten(1).float() / 16, fed.y[own]

    grid = local_grid(clients, [{"partition-id": i} for i in range(3)], answered)
    return {
        "grid": grid,
        "Net": net,
        "ArrayRecord": ArrayRecord,
        "app": ServerApp(),
        "load": rows,
        "fed": fed,
    }

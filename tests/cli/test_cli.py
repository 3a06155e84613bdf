"""The command line: what it prints, how it fails, and that what was killed ends as if it had not
been."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from console import command, fedsso, mentions
from fedsso import InputError, load_run, load_runs
from fedsso.algorithms import ALGORITHMS, make
from fedsso.cli.config import TYPED, Base, Data, model, run_fields
from fedsso.cli.settings import read_settings
from fedsso.engine.settings import options
from fedsso.experiment.trace import at_end

SMALL = ["--clients", "4", "--rounds", "4"]
LONG = [
    "run",
    "--clients",
    "4",
    "--rounds",
    "150",
    "--alpha",
    "0.05",
    "--participation",
    "0.5",
    "--batch-size",
    "20",
]


def curve(folder: Path) -> list[str]:
    """trace.csv without the wall times."""
    header, *lines = (folder / "trace.csv").read_text().splitlines()
    seconds = header.split(",").index("seconds")
    return [
        ",".join(v for i, v in enumerate(line.split(",")) if i != seconds)
        for line in (header, *lines)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fedsso(*LONG, "--out", folder)
    return folder


# ---- each command ----


def test_run_prints_the_result_and_writes_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "a"
    result = fedsso("run", *SMALL, "--alpha", 0.05, "--targets", "0.1,0.999", "--out", out, code=1)
    run = load_run(out)
    assert len(run.trace) == 5
    assert "fedsso alpha=0.05" in result.stdout
    assert f"{run.final():.4f}" in result.stdout
    assert str(out) in result.stdout
    assert "round 4/4" in result.stderr
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_lines_name_the_seed_and_the_round_that_was_measured() -> None:
    """At most ten lines in even steps, where nothing can be drawn again in its place."""
    told = fedsso("run", *SMALL, "--rounds", 12, "--eval-every", 5, "--seeds", "3,4").stderr
    lines = [line for line in told.splitlines() if ": round " in line]
    numbers = re.compile(r"\d\.\d{4}")
    assert [numbers.sub("a", line) for line in lines[:6]] == [
        "fedsso alpha=auto, seed 3: round 2/12",
        "fedsso alpha=auto, seed 3: round 4/12",
        "fedsso alpha=auto, seed 3: round 6/12 test accuracy a (round 5)",
        "fedsso alpha=auto, seed 3: round 8/12 test accuracy a (round 5)",
        "fedsso alpha=auto, seed 3: round 10/12 test accuracy a",
        "fedsso alpha=auto, seed 3: round 12/12 test accuracy a",
    ]
    assert [line.split(":")[0] for line in lines[6:]] == ["fedsso alpha=auto, seed 4"] * 6
    assert lines[6].endswith("round 2/12")  # nothing is left over from the other seed


def test_run_without_out_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fedsso("run", *SMALL)
    assert contents(tmp_path) == {}


def test_seeds_give_one_run_each(tmp_path: Path) -> None:
    fedsso("run", *SMALL, "--seed", 3, "--seeds", "0,1", "--out", tmp_path)
    assert [run.spec.seed for run in load_runs(tmp_path)] == [3, 0, 1]


def test_every_option_reaches_the_run(tmp_path: Path) -> None:
    wish = [
        "--local-epochs",
        "2",
        "--batch-size",
        "full",
        "--drop-rate",
        "0.1",
        "--stragglers",
        "0.5",
    ]
    wish += ["--eval-every", "2"]
    wish += [
        "--eval-train",
        "--init",
        "default",
        "--metrics",
        "auc,f1",
        "--dtype",
        "float64",
        "--engine",
        "loop",
    ]
    wish += [
        "--device",
        "cpu",
        "--loss",
        "cross_entropy",
        "--stop-at",
        "0.99",
        "--model",
        "linear",
        "--seed",
        "7",
    ]
    wish += [
        "--partition",
        "classes",
        "--classes-per-client",
        "3",
        "--partition-seed",
        "5",
        "--R",
        "7",
        "--Lam",
        "9",
    ]
    fedsso("run", *SMALL, *wish, "--lam", 2, "--guard", "none", "--out", tmp_path)
    spec = load_run(tmp_path).spec
    options = {**spec.options, **spec.data, **spec.hyper}
    expected = {
        "local_epochs": 2,
        "batch_size": None,
        "drop_rate": 0.1,
        "stragglers": 0.5,
        "eval_every": 2,
    }
    expected |= {
        "eval_train": True,
        "init": "default",
        "metrics": ("accuracy", "auc", "f1"),
        "dtype": "float64",
    }
    expected |= {
        "engine": "loop",
        "device": "cpu",
        "loss": "cross_entropy",
        "stop_at": 0.99,
        "rounds": 4,
    }
    expected |= {
        "partition": "classes",
        "classes_per_client": 3,
        "R": 7,
        "Lam": 9.0,
        "lam": 2.0,
        "guard": "none",
    }
    assert {k: options[k] for k in expected} == expected
    assert (spec.model, spec.seed, spec.data["seed"], spec.data["clients"]) == ("linear", 7, 5, 4)


def test_compare_all_with_json_picture_and_shared_options(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[fedavg]\neta = 0.5\n[fedsgd]\nalpha = 0.3\n")
    out = tmp_path / "out"
    both = ["--config", config, "--alpha", 0.05, "--targets", "0.3,0.999"]
    result = fedsso("compare", "--algorithms", "all", *SMALL, *both, "--out", out, "--json", code=1)
    found = json.loads(result.stdout)
    # softmax regression has one layer, and several outputs
    outside = [name for name in ALGORITHMS if make(name).asks() == "rows" or name == "fedper"]
    assert [row["algorithm"] for row in found["results"]] == [
        name for name in ALGORITHMS if name not in outside
    ]
    assert list(found["left_out"]) == outside
    assert found["targets"] == [0.3, 0.999]
    assert all(row["rounds_to"]["0.30"]["count"] == 1 for row in found["results"])
    assert all(row["bytes_to"]["0.3"][0] > 0 for row in found["results"])
    assert found["results"][0]["bytes_to"]["0.999"] == [None]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    hyper = {run.spec.algorithm: run.spec.hyper for run in load_runs(out)}
    assert {values["alpha"] for values in hyper.values() if "alpha" in values} == {0.05}
    assert (hyper["fedavg"]["eta"], hyper["fedsso"]["eta"]) == (0.5, 1.0)


def test_compare_prints_a_row_each_and_shows_divergence() -> None:
    extreme = ["--model", "mlp", "--alpha", "1e6", "--algorithms", "fedavg,fedsgd"]
    result = fedsso("compare", *SMALL, *extreme, "--seeds", "0,1", code=1)
    assert "fedavg alpha=1e+06" in result.stdout
    assert "diverged in round" in result.stdout


def test_resume_of_a_finished_run_says_so(whole: Path) -> None:
    before = contents(whole)
    result = fedsso("resume", whole)
    assert "finished already" in result.stderr
    assert "fedsso alpha=0.05" in result.stdout
    assert contents(whole) == before


def test_what_is_printed_is_the_end_of_a_run_not_its_last_round(whole: Path) -> None:
    trace = load_run(whole).trace
    shown = fedsso("resume", whole).stdout
    assert f"{at_end(trace):.4f}" in shown
    assert f"{at_end(trace, 150, 'test_loss'):.4g}" in shown
    assert f"{trace.final('test_loss'):.4g}" not in shown


def test_resume_completes_the_runs_of_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fedsso("compare", *SMALL, "--out", out)
    expected = {folder.name: curve(folder) for folder in sorted(out.glob("*-*"))}
    for folder in list(out.glob("*-*"))[1:]:
        (folder / "trace.csv").unlink()
        (folder / "checkpoint.safetensors").unlink()
    (out / "curves.png").unlink()
    fedsso("resume", out)
    assert {folder.name: curve(folder) for folder in sorted(out.glob("*-*"))} == expected
    assert (out / "curves.png").is_file()


def test_resume_of_runs_on_different_data(tmp_path: Path) -> None:
    expected = {}
    for clients in (3, 4, 5):
        out = tmp_path / str(clients)
        fedsso("run", "--rounds", 3, "--clients", clients, "--out", out)
        expected[clients] = curve(out)
        (out / "checkpoint.safetensors").unlink()
    fedsso("resume", tmp_path)
    assert {clients: curve(tmp_path / str(clients)) for clients in expected} == expected


def test_algorithms_lists_fields_with_defaults_and_docs() -> None:
    found = {row["name"]: row for row in json.loads(fedsso("algorithms", "--json").stdout)}
    assert list(found) == list(ALGORITHMS)
    for name, cls in ALGORITHMS.items():
        expected = [(f.name, f.default, f.metadata["doc"]) for f in fields(cls)]  # type: ignore[arg-type]
        assert [(f["name"], f["default"], f["doc"]) for f in found[name]["fields"]] == expected
    shown = fedsso("algorithms").stdout
    assert "Server-side BFGS" in shown
    assert "--Lam" in shown


def test_data_list_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes(bytes(1500))
    found = {
        row["name"]: row
        for row in json.loads(fedsso("data", "list", "--json", "--data-dir", tmp_path).stdout)
    }
    assert found["digits"]["present"]
    assert found["mnist"]["present"]
    assert not found["fashion_mnist"]["present"]
    assert (found["mnist"]["files"], found["mnist"]["bytes"]) == (
        [str(tmp_path / "mnist.npz")],
        1500,
    )
    assert str(tmp_path / "fashion_mnist.npz") in found["fashion_mnist"]["looked_for"][2]
    shown = fedsso("data", "list", "--data-dir", tmp_path).stdout
    for part in (
        "paper-20",
        "CC BY-SA 3.0",
        "1.5 kB",
        "fedsso data get fashion_mnist",
        str(tmp_path),
    ):
        assert part in shown


def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder's files."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of a file like phishing in form and length, and of one that is no heart data."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "phishing").write_text(
        "".join(f"{i % 2} {1 + i % 68}:1\n" for i in range(11055))
    )
    (tmp_path / "web" / "processed.cleveland.data").write_text(
        "63,1,4,140,260,0,1,112,1,3,2,?,?,2\n"
    )
    yield from served(tmp_path / "web")


def test_data_get_then_run(tmp_path: Path, mirror: str) -> None:
    folder = tmp_path / "data"
    said = fedsso("data", "get", "phishing", "--data-dir", folder, "--mirror", mirror).stderr
    assert "phishing: " in said
    assert [path.name for path in folder.iterdir()] == ["phishing"]
    again = fedsso("data", "get", "phishing", "--data-dir", folder)
    assert "already on this machine" in again.stderr
    done = fedsso("run", "--dataset", "phishing", "--data-dir", folder, "--rounds", 1, "--json")
    assert json.loads(done.stdout)["results"]


def test_data_get_refuses_what_is_not_the_data_set(tmp_path: Path, mirror: str) -> None:
    (tmp_path / "web" / "phishing").write_text("1 1:1\n")
    folder = tmp_path / "data"
    said = fedsso(
        "data", "get", "phishing", "--data-dir", folder, "--mirror", mirror, code=2
    ).stderr
    assert "phishing has 11055" in said
    said = fedsso("data", "get", "heart", "--data-dir", folder, "--mirror", mirror, code=2).stderr
    assert "processed.cleveland.data" in said
    assert "SHA-256" in said
    assert [path.name for path in folder.iterdir() if path.name != ".partial"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("mnst", "did you mean 'mnist'"), ("csv", "no files to fetch"), ("digits", "already on")],
)
def test_data_get_of_something_else(name: str, message: str, tmp_path: Path) -> None:
    assert (
        message
        in fedsso(
            "data", "get", name, "--data-dir", tmp_path, code=0 if name == "digits" else 2
        ).stderr
    )


def test_data_show_draws_here_and_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = fedsso(
        "data", "show", "--dataset", "digits", "--partition", "shards", "--clients", 5
    ).stdout
    assert "Label skew" in shown
    assert "digits-shards.png" in shown
    assert (tmp_path / "digits-shards.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(
        fedsso("data", "show", "--dataset", "synthetic", "--out", "a.svg", "--json").stdout
    )
    assert (found["clients"], found["label_counts"], found["picture"]) == (20, None, "a.svg")
    assert ".pdf, .png, .svg" in fedsso("data", "show", "--out", "a.gif", code=2).stderr
    assert "--partition-seed" in fedsso("data", "show", "--help").stdout


def test_settings_that_were_cut_are_refused_and_edited_ones_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever the file ends behind the mark of its first line, as `head` or a full disk cut it."""
    fedsso("run", *SMALL, "--participation", 0.5, "--out", tmp_path)
    spec, cut = tmp_path / "spec.toml", tmp_path / "cut.toml"
    whole = spec.read_bytes()
    for end in [len("# fedsso-sha256:"), 40, *(i for i, c in enumerate(whole[:-1]) if c == 10)]:
        cut.write_bytes(whole[:end])
        with pytest.raises(InputError, match=r"cut\.toml has lost its end.*delete its first line"):
            read_settings(cut, {}, {})
    for end in (0, len("# fedsso")):
        cut.write_bytes(whole[:end])
        with pytest.raises(InputError, match=r"cut\.toml holds no settings"):
            read_settings(cut, {}, {})
    assert "changed" not in caplog.text
    cut.write_bytes(whole.replace(b"participation = 0.5", b"participation = 0.25"))
    assert read_settings(cut, {}, {}).participation == 0.25
    assert "was changed since fedsso wrote it" in caplog.text
    cut.write_bytes(whole + b"# a line of somebody's own\n")
    assert read_settings(cut, {}, {}).participation == 0.5
    cut.write_text("participation = 0.75\n")  # by hand
    assert read_settings(cut, {}, {}).participation == 0.75


def test_own_csv_files_on_the_command_line(tmp_path: Path) -> None:
    for name in ("north", "south"):
        lines = [f"{i},{(i * 7) % 5}.5,{i % 2}" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,dose,ill", *lines]))
    own = ["--dataset", "csv", "--files", tmp_path, "--target", "ill"]
    fedsso("run", *own, "--rounds", 2, "--out", tmp_path / "run")
    again = json.loads(fedsso("run", "--config", tmp_path / "run" / "spec.toml", "--json").stdout)
    assert again["results"][0]["label"].startswith("fedsso")
    fedsso("resume", tmp_path / "run")
    assert "did you mean 'ill'" in fedsso("run", *own[:-1], "il", code=2).stderr


@pytest.mark.parametrize("name", ["run", "compare"])
def test_help_shows_every_setting_and_hyper_parameter(name: str) -> None:
    shown = fedsso(name, "--help").stdout
    absent = {"run": {"algorithms"}, "compare": {"algorithm", "checkpoint_every"}}[name]
    hyper = {f.name for cls in ALGORITHMS.values() for f in fields(cls)}  # type: ignore[arg-type]
    for key in ({*Base.model_fields, *Data.model_fields} - absent) | hyper:
        assert f"--{key.replace('_', '-')}" in shown
    assert "Example: fedsso" in shown
    assert "[default: 100]" in shown


def test_help_of_every_command_has_an_example() -> None:
    for args in (
        ["resume"],
        ["algorithms"],
        ["data", "list"],
        ["data", "get"],
        ["data", "show"],
        ["version"],
    ):
        assert "Example: fedsso" in fedsso(*args, "--help").stdout


def test_the_settings_file_knows_every_run_option() -> None:
    for one in options():
        default = list(one.default) if isinstance(one.default, tuple) else one.default
        assert model(Base).model_fields[one.name].default == default


def test_verbose_says_which_engine_was_chosen() -> None:
    assert "stacked" not in fedsso("run", *SMALL).stderr
    assert "stacked" in fedsso("run", *SMALL, "-v").stderr


# ---- settings files ----


def test_saved_settings_repeat_the_run(tmp_path: Path) -> None:
    saved, first, second, third = (tmp_path / n for n in ("saved.toml", "a", "b", "c"))
    wish = ["--alpha", 0.05, "--batch-size", "full", "--partition", "iid", "--R", 3]
    fedsso("run", *SMALL, *wish, "--save-config", saved, "--out", first)
    fedsso("run", "--config", saved, "--out", second)
    fedsso("run", "--config", first / "spec.toml", "--out", third)
    assert curve(first) == curve(second) == curve(third)
    assert (
        load_run(first).spec.identity
        == load_run(second).spec.identity
        == load_run(third).spec.identity
    )
    assert tomllib.loads(saved.read_text())["batch_size"] == "full"


def test_a_saved_comparison_repeats_with_its_algorithms_and_seeds(tmp_path: Path) -> None:
    saved, out = tmp_path / "saved.toml", tmp_path / "out"
    fedsso("compare", *SMALL, "--algorithms", "fedavg", "--seeds", "1,2", "--save-config", saved)
    fedsso("compare", "--config", saved, "--out", out)
    assert [(run.spec.algorithm, run.spec.seed) for run in load_runs(out)] == [
        ("fedavg", 1),
        ("fedavg", 2),
    ]


def test_command_line_beats_file_beats_defaults(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'rounds = 3\nlocal_steps = 2\nalgorithm = "fedavg"\n'
        '[data]\nclients = 3\npartition = "iid"\n'
        "[fedavg.alpha]\nscale = 1\nshift = 9\n"
    )
    fedsso("run", "--config", config, "--rounds", 2, "--clients", 4, "--out", tmp_path / "a")
    spec = load_run(tmp_path / "a").spec
    assert (spec.options["rounds"], spec.options["local_steps"], spec.options["batch_size"]) == (
        2,
        2,
        100,
    )
    assert (spec.data["clients"], spec.data["partition"], spec.algorithm) == (4, "iid", "fedavg")
    assert spec.hyper["alpha"] == {"scale": 1.0, "shift": 9.0, "power": 1.0}
    fedsso("run", "--config", config, "--alpha", 0.2, "--out", tmp_path / "b")
    assert load_run(tmp_path / "b").spec.hyper["alpha"] == 0.2


def test_a_step_that_the_server_chooses(tmp_path: Path) -> None:
    """The word on the command line, in a file or left out is the same setting, and is written as it
    was read."""
    config, saved = tmp_path / "c.toml", tmp_path / "saved.toml"
    config.write_text('[fedsso]\nalpha = "auto"\n')
    shown = fedsso(
        "run", *SMALL, "--alpha", "auto", "--out", tmp_path / "a", "--save-config", saved
    ).stdout
    fedsso("run", *SMALL, "--config", config, "--out", tmp_path / "b")
    fedsso("run", *SMALL, "--out", tmp_path / "c")
    fedsso("run", "--config", tmp_path / "a" / "spec.toml", "--out", tmp_path / "d")
    fedsso("run", "--config", saved, "--out", tmp_path / "e")
    runs = [load_run(tmp_path / name) for name in "abcde"]
    assert {run.spec.hyper["alpha"] for run in runs} == {"auto"}
    assert len({run.spec.identity for run in runs}) == 1
    assert all(curve(tmp_path / name) == curve(tmp_path / "a") for name in "bcde")
    assert f"fedsso alpha=auto: client step {runs[0].trace['alpha'][-1]:.3g}\n" in shown
    fedsso("run", *SMALL, "--config", config, "--alpha", 0.01, "--out", tmp_path / "f")
    assert load_run(tmp_path / "f").spec.hyper["alpha"] == 0.01


def test_options_of_one_data_set_come_from_the_file(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'model = "linear"\nloss = "bce"\n'
        '[data]\ndataset = "synthetic"\nkind = "logistic"\ndim = 6\n'
    )
    fedsso("run", *SMALL, "--config", config, "--out", tmp_path / "a")
    assert load_run(tmp_path / "a").spec.data["dim"] == 6


BAD_FILES = {
    "unknown key": ("roundz = 3", "unknown key 'roundz'; did you mean 'rounds'?"),
    "unknown data key": ("[data]\nclient = 3", "did you mean 'clients'?"),
    "unknown field": (
        "[fedsso]\nalpah = 1.0",
        "[fedsso] … 'alpah' … did you mean 'alpha'?",
    ),
    "unknown schedule key": ("[fedsso.alpha]\nscal = 1.0", "did you mean 'scale'?"),
    "wrong type": ('rounds = "many"', "rounds … integer … got 'many'"),
    "wrong union": (
        'batch_size = "all"',
        "batch_size … integer … 'full' … got 'all'",
    ),
    "wrong field type": (
        '[fedsso]\nalpha = "x"',
        "fedsso.alpha … number … table … 'auto' … got 'x'",
    ),
    "a word for another": (
        '[fedavg]\nalpha = "auto"',
        "fedavg.alpha … number … table … got 'auto'",
    ),
    "wrong schedule type": (
        '[fedsso.alpha]\nscale = "x"',
        "fedsso.alpha.scale … number … got 'x'",
    ),
    "not a table": ("data = 3", "data must be a table, got 3"),
    "malformed": ("rounds = = 3", "as TOML"),
    "seed twice": ("seed = 1\nseeds = [2]", "unknown key 'seeds'; did you mean 'seed'?"),
    "no seed": ("seeds = []", "at least one"),
    "own arrays": ("[record]\ndigest = 'x'", "repeat it from Python"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_settings_file_is_refused(name: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    config = tmp_path / "c.toml"
    config.write_text(text)
    before = contents(tmp_path)
    result = fedsso(
        "run",
        "--config",
        config,
        "--out",
        tmp_path / "out",
        "--save-config",
        tmp_path / "s",
        code=2,
    )
    assert mentions(result.stderr, message)
    assert result.stdout == ""
    assert contents(tmp_path) == before


# ---- wrong input ----

BAD = {
    "algorithm": (["--algorithm", "fedso"], "algorithm 'fedso' … did you mean 'fedsso'?"),
    "data set": (["--dataset", "digit"], "data set 'digit' … did you mean 'digits'?"),
    "model": (["--model", "mlcr"], "model 'mlcr' … did you mean 'mclr'?"),
    "partition": (
        ["--partition", "dirichelt"],
        "partition 'dirichelt' … did you mean 'dirichlet'?",
    ),
    "loss": (["--loss", "mes"], "did you mean 'mse'?"),
    "metric": (["--metrics", "acu"], "did you mean 'auc'?"),
    "engine": (["--engine", "lop"], "did you mean 'loop'?"),
    "device": (["--device", "gpu"], "use auto, cpu, cuda or cuda:1"),
    "dtype": (["--dtype", "float16"], "float32"),
    "init": (["--init", "nowhere"], "nowhere"),
    "alpha 0": (["--alpha", "0"], "alpha … > 0 … alpha=0"),
    "alpha negative": (["--alpha", "-1"], "alpha must be > 0"),
    "lam": (["--lam", "10", "--Lam", "1"], "lam … < Lam … lam=10.0, Lam=1.0"),
    "R": (["--R", "1"], "R must be an integer >= 2"),
    "form": (["--form", "bgfs"], "did you mean 'bfgs'?"),
    "local steps": (["--local-steps", "0"], "local_steps must be an integer >= 1"),
    "rounds": (["--rounds", "0"], "rounds must be an integer >= 1"),
    "checkpoints": (["--checkpoint-every", "0"], "checkpoint_every must be"),
    "clients": (["--clients", "1798"], "1797"),
    "participation 0": (["--participation", "0"], "participation must lie in (0, 1]"),
    "participation 2": (["--participation", "2"], "participation must lie in (0, 1]"),
    "not its option": (
        ["--algorithm", "fedavg", "--guard", "none"],
        "--guard … fedavg … --alpha, --eta",
    ),
    "not a number": (["--alpha", "small"], "small"),
    "a wrong word": (["--alpha", "outo"], "auto"),
    "a word for another": (
        ["--algorithm", "fedavg", "--alpha", "auto"],
        "alpha='auto': only FedSSO can",
    ),
    "no such option": (["--alhpa", "1"], "--alpha"),
    "no file": (["--config", "nowhere.toml"], "nowhere.toml"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_told_and_leaves_no_file(name: str, tmp_path: Path) -> None:
    args, message = BAD[name]
    result = fedsso(
        "run", *args, "--out", tmp_path / "out", "--save-config", tmp_path / "saved.toml", code=2
    )
    assert mentions(result.stderr, message)
    assert "Traceback" not in result.output
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "wish",
    [
        ["--algorithm", "fedper"],
        ["--algorithm", "fednl", "--participation", "0.5"],
        ["--algorithm", "fedavg", "--compress", "rank:100"],
    ],
)
def test_an_unsuited_algorithm_leaves_no_file(wish: list[str], tmp_path: Path) -> None:
    result = fedsso(
        "run", *SMALL, *wish, "--out", tmp_path / "a", "--save-config", tmp_path / "a.toml", code=2
    )
    assert "error:" in result.stderr
    assert not list(tmp_path.iterdir())


def test_compare_refuses_an_option_that_no_algorithm_has() -> None:
    result = fedsso("compare", "--algorithms", "fedavg,fedsgd", "--form", "dfp", code=2)
    assert mentions(result.stderr, "--form … fedavg or fedsgd … --alpha, --eta")


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("run", "--lr", "--alpha"),
        ("compare", "--learning-rate", "--alpha"),
        ("sweep", "--server-lr", "--eta"),
        ("run", "--n-rounds", "--rounds"),
        ("sweep", "--fraction-fit", "--participation"),
        ("run", "--num-clients", "--clients"),
        ("data show", "--num-partitions", "--clients"),
    ],
)
def test_an_option_of_other_libraries_is_told_by_its_name_here(
    command: str, typed: str, meant: str
) -> None:
    result = fedsso(*command.split(), typed, "3", code=2)
    assert mentions(result.stderr, f"No such option '{typed}'; here it is called {meant}.")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("run --rounds -1", "rounds must be an integer >= 1, got rounds=-1"),
        ("run --participation 2", "participation must lie in (0, 1], got participation=2"),
        ("compare --device gpu", "unknown device 'gpu'"),
        ("run --loss hinge", "hinge"),
        ("run --metrics recal", "recal"),
        ("run --model mlcr", "did you mean 'mclr'?"),
        ("sweep --select vall", "did you mean 'val'?"),
        ("sweep --batch-size 0", "batch_size must be an integer >= 1"),
        ("sweep --minutes 0", "--minutes must be > 0"),
    ],
)
def test_wrong_options_are_told_before_the_data_are_loaded(typed: str, told: str) -> None:
    data = ["--dataset", "csv", "--files", "nowhere.csv", "--column", "y"]
    shown = fedsso(*typed.split(), *data, code=2).stderr
    assert mentions(shown, told)
    assert "nowhere.csv" not in shown


def test_the_help_offers_only_what_can_be_typed() -> None:
    described = run_fields()
    assert described.keys() >= TYPED.keys()
    for name, (in_python, in_files) in TYPED.items():
        (one,) = [one for one in options() if one.name == name]
        assert in_python in one.doc
        assert in_files in described[name][1].description
        assert "your own" not in described[name][1].description


def test_markup_in_a_value_is_printed_as_it_is() -> None:
    assert "'[red]x'" in fedsso("run", "--algorithm", "[red]x", code=2).stderr


def test_out_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = fedsso(
        "run", *SMALL, "--out", tmp_path / "file" / "a", "--save-config", tmp_path / "s", code=2
    )
    assert "cannot write" in result.stderr
    assert contents(tmp_path) == {"file": b"x"}


def test_out_with_a_name_that_is_too_long(tmp_path: Path) -> None:
    result = fedsso("run", *SMALL, "--out", tmp_path / ("x" * 300), code=2)
    assert "out must be the path of a file or folder" in result.stderr
    assert "File name too long" in result.stderr
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["run", "compare"])
def test_out_that_holds_a_run(name: str, whole: Path) -> None:
    before = contents(whole.parent)
    for out in (whole, whole.parent):
        told = fedsso(name, *SMALL, "--out", out, code=2).stderr
        assert mentions(told, "already holds a run … another folder … `fedsso resume")
    assert contents(whole.parent) == before


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    assert "give the --out folder of a run" in fedsso("resume", tmp_path, code=2).stderr
    assert "give the --out folder of a run" in fedsso("resume", tmp_path / "nowhere", code=2).stderr


def test_a_damaged_checkpoint_is_told_and_computed_again(tmp_path: Path) -> None:
    fedsso("run", *SMALL, "--out", tmp_path)
    file = tmp_path / "checkpoint.safetensors"
    model = load_run(tmp_path).x
    for damaged in (file.read_bytes()[:-9], b"", b"nonsense" * 9):
        file.write_bytes(damaged)
        assert "damaged" in fedsso("resume", tmp_path).stderr
        assert torch.equal(load_run(tmp_path).x, model)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    fedsso("run", *SMALL, "--alpha", 0.05, "--out", tmp_path)
    spec = tmp_path / "spec.toml"
    spec.write_text(spec.read_text().replace("alpha = 0.05", "alpha = 0.06"))
    assert "spec.toml is not as fedsso wrote it" in fedsso("resume", tmp_path, code=2).stderr


# ---- processes that end badly ----


def start(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_once_there(process: subprocess.Popen[str], file: Path) -> None:
    """kill -9 as soon as the file exists."""
    limit = time.monotonic() + 600  # only ends a hang
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, f"{file} never came"
        time.sleep(0.005)
    process.kill()
    process.communicate()


def test_a_killed_run_resumes_to_the_same_trace(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*LONG, "--out", out, "--checkpoint-every", 5)
    kill_once_there(process, out / "checkpoint.safetensors")
    assert process.returncode == -signal.SIGKILL
    assert "finished already" not in fedsso("resume", out).stderr
    assert curve(out) == curve(whole)


@pytest.mark.full
def test_a_run_killed_before_its_first_checkpoint_starts_again(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_once_there(start(*LONG, "--out", out, "--checkpoint-every", 1000), out / "spec.toml")
    assert not (out / "checkpoint.safetensors").exists()
    fedsso("resume", out)
    assert curve(out) == curve(whole)


@pytest.mark.sample
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(*LONG, "--out", out, "--checkpoint-every", 1000)
    assert process.stderr is not None
    assert "4 clients" in process.stderr.readline()
    assert "round 15/150" in process.stderr.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "stopped after round " in said
    assert f"; `fedsso resume {out}` continues" in said
    assert "Traceback" not in said
    assert len((out / "trace.csv").read_text().splitlines()) < 150
    fedsso("resume", out)
    assert curve(out) == curve(whole)


def test_python_m_fedsso_exits_with_2_on_wrong_input() -> None:
    done = subprocess.run(
        command("run", "--algorithm", "fedso"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "did you mean 'fedsso'?" in done.stderr
    assert done.stdout == ""


def test_a_notebooks_pictures_and_strict_warnings_do_not_end_a_command(tmp_path: Path) -> None:
    """`!fedsso` in a notebook inherits a backend whose package need not be installed here."""
    python, *rest = command("compare", *SMALL, "--algorithms", "fedavg", "--out", tmp_path / "out")
    env = {**os.environ, "MPLBACKEND": "module://a_backend_that_is_not_here"}
    strict = [python, "-W", "error::DeprecationWarning", *rest]
    done = subprocess.run(strict, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("*.png"))


@pytest.mark.full
def test_help_on_a_terminal_that_knows_ascii_alone() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command("run", "--help"), capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "--alpha" in done.stdout


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['pydantic'] = None; from fedsso.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install '.[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


OWN = """
import sys
from fedsso.algorithms import ALGORITHMS, FedAvg
from fedsso.algorithm import hyper, param

@hyper
class Own(FedAvg):
    '''Mine.'''
    kappa: float = param(default=0.5, doc="my constant")

ALGORITHMS["own"] = Own
from fedsso.cli.main import main
options = ["--kappa", "0.25", "--rounds", "2", "--clients", "3", "--json"]
sys.argv = ["fedsso", "run", "--algorithm", "own", *options]
main()
"""


@pytest.mark.full
def test_a_registry_line_is_enough_for_an_option() -> None:
    done = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["results"][0]["label"] == "own alpha=0.01 kappa=0.25"


def test_version() -> None:
    assert fedsso("version").stdout.startswith("fedsso ")

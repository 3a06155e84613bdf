"""Every kind of file that the library reads, with each of its readers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsso
from fedsso.experiment.spec import CHECKPOINT, SPEC, TRACE
from fedsso.experiment.tuning.search import JOURNAL
from fedsso.regression.result.model import MODEL, SCHEMA

from .outcome import TRIALS, outcome
from .samples import DIGITS
from .scenes import SCENES, command, flower

ENDED = (0, 1)  # in one round a target may be missed
LEAST = (
    "--rounds",
    1,
    "--local-steps",
    1,
    "--batch-size",
    10,
    "--eval-every",
    1,
    "--min-rows",
    1,
)  # whatever a file asks for


@dataclass(frozen=True)
class Target:
    """A file, and what reads it; paths are below the current folder, which holds the samples."""

    name: str
    file: str
    copied: str  # the folder or file that the reader needs
    read: Callable[[], Any]
    form: str  # text, json, toml, csv, safetensors, npz, gzip, bzip2, idx, pickle
    other: str = ""  # another good file of the same kind
    guarded: bool = False  # a checksum tells of any change
    exact: bool = (
        True  # the result is the same or none; else something may be left out, with a word
    )


# ---- readers ----


def _resume(folder: str) -> Any:
    command("resume", folder)
    return outcome(Path(folder))


def _load_run(folder: str) -> Any:
    fedsso.load_run(folder)
    return outcome(Path(folder))


def _report(folder: str) -> Any:
    command("report", folder, "--out", "page.html")
    page = Path("page.html").read_text()
    return {"page": page, "curves": curves(page)}


def curves(page: str) -> list[str]:
    """The curves of a report, whatever they are called."""
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    columns = [trace["columns"] for curve in data["curves"] for trace in curve["traces"]]
    keys = ("round", "train_loss", "test_loss", "test_accuracy")
    return sorted(
        " ".join(data["arrays"][own[key]] for key in keys if key in own) for own in columns
    )


def _run_config(file: str) -> Any:
    command("run", "--config", file, *LEAST, "--out", "new", fine=ENDED)
    return outcome(Path("new"))


def _sweep_config(file: str) -> Any:
    command("sweep", "--config", file, *LEAST, "--out", "new", fine=ENDED)
    return outcome(Path("new"))


def _run_init(file: str) -> Any:
    command("run", *DIGITS, "--algorithm", "fedavg", "--init", file, *LEAST, "--out", "new")
    return outcome(Path("new"))


def _sweep_again(folder: str) -> Any:
    SCENES["sweep"].again(Path(folder))
    return outcome(Path(folder))


def _tune_again(folder: str) -> Any:
    SCENES["tune"].again(Path(folder))
    return {**outcome(Path(folder)), "found": Path(folder, TRIALS).read_text()}


def _predict(folder: str) -> Any:
    command("predict", f"{folder}/model", f"{folder}/new.csv", "--out", "new.csv")
    return {"digest": Path("new.csv").read_text()}


def _report_model(folder: str) -> Any:
    command("report", folder, "--out", "page.html")
    return {"digest": Path("page.html").read_text()}


def _glm(folder: str) -> Any:
    """A fit of the tables of a folder, by the schema beside them."""
    schema = ("--schema", f"{folder}/schema.toml")
    command("glm", "--files", folder, *schema, "--out", "model", fine=ENDED)
    model = fedsso.load_model("model")
    print(*model.notes, sep="\n", file=sys.stderr)
    found = model.fit.coefficients
    return {"digest": found.tolist(), "finite": bool(np.isfinite(found).all())}


def _flower(folder: str) -> Any:
    model = flower(Path(folder))
    return {**outcome(Path(folder)), "model": model}


def _load(name: str, **options: Any) -> Any:
    fed = fedsso.load(name, min_rows=1, **options)
    x = fed.x[torch.arange(len(fed.x))]  # of shards too, which stay in their files
    return {"digest": fed.digest(), "finite": bool(x.float().isfinite().all())}


# ---- the list ----


def targets(folder: Path) -> list[Target]:
    """All of them; the folder holds the samples."""
    return [
        *_of_runs(),
        *_of_flower(),
        *_of_sweeps(folder),
        *_of_tunes(folder),
        *_of_models(),
        *_of_settings(),
        *_of_tables(),
        *_of_images(),
        *_of_texts(),
    ]


def _of_runs() -> list[Target]:
    resume, finished, report = (
        partial(_resume, "half"),
        partial(_load_run, "done"),
        partial(_report, "done"),
    )
    alone, config = partial(_report, f"done/{TRACE}"), partial(_run_config, f"done/{SPEC}")
    spec, kept, trace = (f"other/{name}" for name in (SPEC, CHECKPOINT, TRACE))
    return [
        Target("spec resumed", f"half/{SPEC}", "half", resume, "toml", spec, True),
        Target("spec reported", f"done/{SPEC}", "done", report, "toml", spec, True, False),
        Target("spec as --config", f"done/{SPEC}", "done", config, "toml", "", True, False),
        Target(
            "checkpoint resumed", f"half/{CHECKPOINT}", "half", resume, "safetensors", kept, True
        ),
        Target(
            "checkpoint of a finished run",
            f"done/{CHECKPOINT}",
            "done",
            finished,
            "safetensors",
            kept,
            True,
        ),
        Target(
            "checkpoint reported",
            f"done/{CHECKPOINT}",
            "done",
            report,
            "safetensors",
            kept,
            True,
            False,
        ),
        Target("trace resumed", f"half/{TRACE}", "half", resume, "csv", trace, True),
        Target("trace of a finished run", f"done/{TRACE}", "done", finished, "csv", trace, True),
        Target("trace alone reported", f"done/{TRACE}", f"done/{TRACE}", alone, "csv", trace),
    ]


def _of_flower() -> list[Target]:
    resume, report = partial(_flower, "flower"), partial(_report, "flower")
    kept, trace = (f"flower/{name}" for name in (CHECKPOINT, TRACE))
    other, other_trace = (f"flower-other/{name}" for name in (CHECKPOINT, TRACE))
    return [
        Target("checkpoint of Flower", kept, "flower", resume, "safetensors", other, True),
        Target("trace of Flower", trace, "flower", resume, "csv", other_trace),
        Target(
            "checkpoint of Flower reported",
            kept,
            "flower",
            report,
            "safetensors",
            other,
            True,
            False,
        ),
    ]


def _of_sweeps(folder: Path) -> list[Target]:
    again, report = partial(_sweep_again, "sweep"), partial(_report, "sweep")
    config = partial(_sweep_config, "sweep/sweep.toml")
    first, second = (folder / "sweep-parts").read_text().split()
    return [
        Target("part of a sweep", first, "sweep", again, "npz", second, True),
        Target("part reported", first, "sweep", report, "npz", second, True, False),
        Target(
            "sweep.toml as --config",
            "sweep/sweep.toml",
            "sweep",
            config,
            "toml",
            guarded=True,
            exact=False,
        ),
        Target(
            "sweep.toml reported",
            "sweep/sweep.toml",
            "sweep",
            report,
            "toml",
            "config.toml",
            True,
            False,
        ),
        Target("trials.csv reported", "sweep/trials.csv", "sweep", report, "csv", f"other/{TRACE}"),
    ]


def _of_tunes(folder: Path) -> list[Target]:
    first, second = (folder / "tune-parts").read_text().split()
    again, journal = partial(_tune_again, "tune"), f"tune/{JOURNAL}"
    return [
        Target("part of a tune", first, "tune", again, "npz", second, True),
        Target("journal of a tune", journal, "tune", again, "json", "config.toml"),
    ]


def _of_models() -> list[Target]:
    kept, other = (f"{name}/model/{MODEL}" for name in ("glm", "glm-other"))
    schema, fewer = (f"{name}/model/{SCHEMA}" for name in ("glm", "glm-other"))
    predict, glm = partial(_predict, "glm"), partial(_glm, "hospitals")
    report = partial(_report_model, "glm/model")
    return [
        Target("model predicts", kept, "glm", predict, "json", other, True),
        Target("model reported", kept, "glm", report, "json", other, True),
        Target("schema of a model", schema, "glm", predict, "toml", fewer, True),
        Target("new patients", "glm/new.csv", "glm", predict, "csv", "tables/a.csv"),
        Target("schema", f"hospitals/{SCHEMA}", "hospitals", glm, "toml", "config.toml"),
        Target("table of a regression", "hospitals/Linz.csv", "hospitals", glm, "csv", "svm"),
    ]


def _of_settings() -> list[Target]:
    config, init = partial(_run_config, "config.toml"), partial(_run_init, "init.safetensors")
    return [
        Target("--config", "config.toml", "config.toml", config, "toml", "sweep/sweep.toml"),
        Target(
            "--init",
            "init.safetensors",
            "init.safetensors",
            init,
            "safetensors",
            f"other/{CHECKPOINT}",
        ),
    ]


def _of_tables() -> list[Target]:
    csv = partial(_load, "csv", files=["tables"], target="sick")
    hospital = partial(_load, "heart", data_dir="heart")
    packed = (
        ("svmlight", "", "svm"),
        ("svmlight, gzip", ".gz", "gzip"),
        ("svmlight, bzip2", ".bz2", "bzip2"),
    )
    svm = partial(_load, "svmlight", clients=2)
    shards = partial(_load, "npy", files=["npy"])
    return [
        Target("table", "tables/a.csv", "tables", csv, "csv", f"other/{TRACE}"),
        Target("hospital", "heart/processed.va.data", "heart", hospital, "csv", "tables/a.csv"),
        *(
            Target(
                name,
                f"svm{end}",
                f"svm{end}",
                partial(svm, files=[f"svm{end}"]),
                form,
                "init.safetensors",
            )
            for name, end, form in packed
        ),
        *(
            Target(f"npy, {name}", f"npy/{name}.npy", "npy", shards, "npy", "npz/mnist.npz")
            for name in ("x", "y", "client")
        ),
    ]


def _of_images() -> list[Target]:
    images = partial(_load, partition="iid", clients=3)
    mnist, cifar = partial(images, "mnist"), partial(images, "cifar10")
    idx, labels = "idx/mnist/train-images-idx3-ubyte", "idx/mnist/train-labels-idx1-ubyte"
    packed, others = (
        "packed/mnist/train-labels-idx1-ubyte.gz",
        "packed/mnist/train-images-idx3-ubyte.gz",
    )
    binary, pickled = (
        "bin/cifar-10-batches-bin/data_batch_2.bin",
        "py/cifar-10-batches-py/data_batch_2",
    )
    return [
        Target(
            "images, npz", "npz/mnist.npz", "npz", partial(mnist, data_dir="npz"), "npz", packed
        ),
        Target("images, idx", idx, "idx", partial(mnist, data_dir="idx"), "idx", labels),
        Target(
            "labels, idx, gzip", packed, "packed", partial(mnist, data_dir="packed"), "gzip", others
        ),
        Target(
            "images, CIFAR binary", binary, "bin", partial(cifar, data_dir="bin"), "binary", pickled
        ),
        Target(
            "images, CIFAR pickle", pickled, "py", partial(cifar, data_dir="py"), "pickle", binary
        ),
    ]


def _of_texts() -> list[Target]:
    play = partial(_load, "shakespeare", data_dir="text", clients=2)
    tweets = partial(_load, "sentiment140", data_dir="text", clients=2, buckets=16)
    words = partial(tweets, vectors="text/glove.txt")
    return [
        Target("play", "text/tinyshakespeare.txt", "text", play, "text", "config.toml"),
        Target("tweets", "text/sentiment140_10k.csv.gz", "text", tweets, "gzip", "svm.gz"),
        Target("word vectors", "text/glove.txt", "text", words, "text", "config.toml"),
    ]

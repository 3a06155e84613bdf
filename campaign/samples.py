"""Good files of every kind that the library reads, small, and who reads them."""

from __future__ import annotations

import bz2
import gzip
import os
import pickle
import random
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fedsso
from fedsso.runs import CHECKPOINT, SPEC, TRACE

from .faults import Files
from .forks import forked
from .outcome import outcome
from .scenes import SCENES, command, flower

MODEL = 650  # parameters of mclr on the digits
LEAST = ("--rounds", 1, "--local-steps", 1, "--batch-size", 10, "--eval-every", 1)  # whatever a file asks for
PATIENCE = 120.0
DIGITS = ("--dataset", "digits", "--clients", 3)


@dataclass(frozen=True)
class Target:
    """A file, and what reads it; paths are below the folder of the samples, which is the current one."""

    name: str
    file: str
    copied: str  # the folder or file that the reader needs
    read: Callable[[], Any]
    form: str  # text, toml, csv, safetensors, npz, gzip, bzip2, idx, pickle
    other: str = ""  # another good file of the same kind
    guarded: bool = False  # a checksum tells of any change
    exact: bool = True  # the result is the same or none; else something may be left out, with a word


# ---- readers ----


def _resume(folder: str) -> Any:
    command("resume", folder)
    return outcome(Path(folder))


def _load_run(folder: str) -> Any:
    fedsso.load_run(folder)
    return outcome(Path(folder))


def _report(folder: str) -> Any:
    command("report", folder, "--out", "page.html")
    return Path("page.html").read_text()


def _run_config(file: str) -> Any:
    command("run", "--config", file, *LEAST, "--out", "new")
    return outcome(Path("new"))


def _sweep_config(file: str) -> Any:
    command("sweep", "--config", file, *LEAST, "--out", "new")
    return outcome(Path("new"))


def _run_init(file: str) -> Any:
    command("run", *DIGITS, "--algorithm", "fedavg", "--init", file, *LEAST, "--out", "new")
    return outcome(Path("new"))


def _sweep_again(folder: str) -> Any:
    SCENES["sweep"].again(Path(folder))
    return outcome(Path(folder))


def _flower(folder: str) -> Any:
    model = flower(Path(folder))
    return {**outcome(Path(folder)), "model": model}


def _load(name: str, **options: Any) -> Any:
    fed = fedsso.load(name, min_rows=1, **options)
    return {"digest": fed.digest(), "finite": bool(fed.x.float().isfinite().all())}


_csv = partial(_load, "csv", files=["tables"], target="sick")
_images = partial(_load, partition="iid", clients=3)


# ---- the files ----


def make(folder: Path) -> list[Target]:
    """Write all samples; the targets that they are for."""
    folder.mkdir(parents=True, exist_ok=True)
    for work in (_runs, _half, _sweeps, _flowers, _settings):
        ended = forked(partial(_inside, folder, work), PATIENCE)
        if (ended.code and ended.code != -signal.SIGKILL) or ended.error:
            raise RuntimeError(f"{work.__name__}: {ended.error or ended.said}")
    _inside(folder, _data)
    return targets(folder)


def _inside(folder: Path, work: Callable[[], None]) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        work()
    finally:
        os.chdir(before)


def _runs() -> None:
    SCENES["run"].begin(Path("done"))
    command("run", *DIGITS, "--algorithm", "fedavg", "--rounds", 12, "--out", "other")


def _half() -> None:
    """A run that is killed when its second checkpoint has its trace."""
    log = Path("log").absolute()

    def act(_number: int, _kind: str) -> None:
        names = log.read_text().split() if log.exists() else []
        if names.count(CHECKPOINT) >= 2 and names.count(TRACE) >= 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Files(Path("half").absolute(), act, log).install()
    SCENES["run"].begin(Path("half"))


def _sweeps() -> None:
    SCENES["sweep"].begin(Path("sweep"))
    first, second = sorted(Path("sweep/parts").glob("*.npz"))[:2]
    Path("names").write_text(f"{first}\n{second}\n")


def _flowers() -> None:
    flower(Path("flower"), 4)
    flower(Path("flower-other"), 2)


CONFIG = """# settings of a run
model = "mclr"
algorithm = "fedavg"
seed = 3
dtype = "float32"
participation = 0.5
targets = [0.5, 0.9]

[data]
dataset = "digits"
clients = 4
partition = "dirichlet"
concentration = 0.5
test_fraction = 0.25

[fedavg]
alpha = 0.1
"""


def _settings() -> None:
    import torch
    from safetensors.torch import save_file

    from fedsso.models import build

    Path("config.toml").write_text(CONFIG)
    draw = torch.Generator().manual_seed(0)
    module = build("mclr", (1, 8, 8), 10)
    weights = {name: 0.1 * torch.randn(p.shape, generator=draw) for name, p in module.named_parameters()}
    save_file(weights, "init.safetensors")


def _data() -> None:
    import numpy as np

    draw = random.Random(0)
    Path("tables").mkdir()
    for name in ("a", "b"):
        rows = [f"{draw.gauss(50, 9):.1f},{draw.gauss(0, 1):.4f},{draw.randint(0, 1)}" for _ in range(30)]
        Path("tables", f"{name}.csv").write_text("\n".join(["age,dose,sick", *rows]) + "\n")
    text = "".join(f"{draw.choice(('+1', '-1'))} {_entries(draw)}\n" for _ in range(40)).encode()
    for suffix, pack in (("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)):
        Path(f"svm{suffix}").write_bytes(pack(text))
    numbers = np.random.default_rng(0)
    x, y = numbers.integers(0, 256, (60, 28, 28), np.uint8), numbers.integers(0, 10, 60).astype(np.uint8)
    Path("npz").mkdir()
    np.savez_compressed("npz/mnist.npz", x=x, y=y)
    for folder, pack, suffix in (("idx", bytes, ""), ("packed", gzip.compress, ".gz")):
        Path(folder, "mnist").mkdir(parents=True)
        for part in ("train", "t10k"):
            for kind, array in (("images-idx3", x), ("labels-idx1", y)):
                Path(folder, "mnist", f"{part}-{kind}-ubyte{suffix}").write_bytes(pack(_idx(array)))
    _cifar(numbers)
    _texts(draw)
    _hospitals(draw)


def _entries(draw: random.Random) -> str:
    return " ".join(f"{i}:{draw.gauss(0, 1):.3f}" for i in sorted(draw.sample(range(1, 13), 6)))


def _idx(array: Any) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def _cifar(numbers: Any) -> None:
    from fedsso.data.images import CIFAR

    Path("bin/cifar-10-batches-bin").mkdir(parents=True)
    Path("py/cifar-10-batches-py").mkdir(parents=True)
    for name in CIFAR:
        x, y = numbers.integers(0, 256, (10, 3072), "uint8"), numbers.integers(0, 10, 10)
        records = b"".join(bytes([label]) + row.tobytes() for row, label in zip(x, y.tolist(), strict=True))
        Path("bin/cifar-10-batches-bin", f"{name}.bin").write_bytes(records)
        Path("py/cifar-10-batches-py", name).write_bytes(pickle.dumps({b"data": x, b"labels": y.tolist()}, 2))


def _texts(draw: random.Random) -> None:
    words = ["day", "great", "rain", "sun", "happy", "sad", "why", "now"]
    lines = [" ".join(draw.choices(words, k=9)) for _ in range(60)]
    Path("text").mkdir()
    Path("text/tinyshakespeare.txt").write_text("".join(f"KING {i % 4}:\n{line}\n\n" for i, line in enumerate(lines)))
    tweets = [f'"{draw.choice((0, 4))}","{i}","now","NO","user{i % 5}","{line}"\n' for i, line in enumerate(lines)]
    Path("text/sentiment140_10k.csv.gz").write_bytes(gzip.compress("".join(tweets).encode()))
    vectors = [" ".join([word, *(f"{draw.gauss(0, 1):.4f}" for _ in range(6))]) for word in words]
    Path("text/glove.txt").write_text("\n".join(vectors) + "\n")


def _hospitals(draw: random.Random) -> None:
    Path("heart").mkdir()
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [[f"{abs(draw.gauss(50, 9)):.1f}" for _ in range(13)] + [str(draw.randint(0, 4))] for _ in range(20)]
        Path("heart", f"processed.{name}.data").write_text("".join(",".join(row) + "\n" for row in rows))


def targets(folder: Path) -> list[Target]:
    """Every kind of file with each of its readers."""
    first, second = (folder / "names").read_text().split()
    idx, gz = "idx/mnist/train-images-idx3-ubyte", "packed/mnist/train-labels-idx1-ubyte.gz"
    tweets = partial(_load, "sentiment140", data_dir="text", clients=2, buckets=16)
    return [
        Target("spec resumed", f"half/{SPEC}", "half", partial(_resume, "half"), "toml", f"other/{SPEC}", True),
        Target("spec reported", f"done/{SPEC}", "done", partial(_report, "done"), "toml", f"other/{SPEC}", True, False),
        Target("spec as --config", f"done/{SPEC}", "done", partial(_run_config, f"done/{SPEC}"), "toml", f"other/{SPEC}"),
        Target(
            "checkpoint resumed", f"half/{CHECKPOINT}", "half", partial(_resume, "half"), "safetensors",
            f"other/{CHECKPOINT}", True,
        ),
        Target(
            "checkpoint of a finished run", f"done/{CHECKPOINT}", "done", partial(_load_run, "done"), "safetensors",
            f"other/{CHECKPOINT}", True,
        ),
        Target(
            "checkpoint reported", f"done/{CHECKPOINT}", "done", partial(_report, "done"), "safetensors",
            f"other/{CHECKPOINT}", True, False,
        ),
        Target("trace resumed", f"half/{TRACE}", "half", partial(_resume, "half"), "csv", f"other/{TRACE}", True),
        Target("trace of a finished run", f"done/{TRACE}", "done", partial(_load_run, "done"), "csv", f"other/{TRACE}", True),
        Target("trace alone reported", f"done/{TRACE}", f"done/{TRACE}", partial(_report, f"done/{TRACE}"), "csv", f"other/{TRACE}"),
        Target(
            "checkpoint of Flower", f"flower/{CHECKPOINT}", "flower", partial(_flower, "flower"), "safetensors",
            f"flower-other/{CHECKPOINT}", True,
        ),
        Target("trace of Flower", f"flower/{TRACE}", "flower", partial(_flower, "flower"), "csv", f"flower-other/{TRACE}", True),
        Target(
            "checkpoint of Flower reported", f"flower/{CHECKPOINT}", "flower", partial(_report, "flower"), "safetensors",
            f"flower-other/{CHECKPOINT}", True, False,
        ),
        Target("part of a sweep", first, "sweep", partial(_sweep_again, "sweep"), "npz", second, True),
        Target("part reported", first, "sweep", partial(_report, "sweep"), "npz", second, True, False),
        Target("sweep.toml as --config", "sweep/sweep.toml", "sweep", partial(_sweep_config, "sweep/sweep.toml"), "toml", "config.toml"),
        Target("sweep.toml reported", "sweep/sweep.toml", "sweep", partial(_report, "sweep"), "toml", "config.toml", True, False),
        Target("trials.csv reported", "sweep/trials.csv", "sweep", partial(_report, "sweep"), "csv", f"other/{TRACE}"),
        Target("--config", "config.toml", "config.toml", partial(_run_config, "config.toml"), "toml", "sweep/sweep.toml"),
        Target("--init", "init.safetensors", "init.safetensors", partial(_run_init, "init.safetensors"), "safetensors", f"other/{CHECKPOINT}"),
        Target("table", "tables/a.csv", "tables", _csv, "csv", f"other/{TRACE}"),
        Target("svmlight", "svm", "svm", partial(_load, "svmlight", files=["svm"], clients=2), "svm", "svm.gz"),
        Target("svmlight, gzip", "svm.gz", "svm.gz", partial(_load, "svmlight", files=["svm.gz"], clients=2), "gzip", "svm.bz2"),
        Target("svmlight, bzip2", "svm.bz2", "svm.bz2", partial(_load, "svmlight", files=["svm.bz2"], clients=2), "bzip2", "svm"),
        Target("images, npz", "npz/mnist.npz", "npz", partial(_images, "mnist", data_dir="npz"), "npz", first),
        Target("images, idx", idx, "idx", partial(_images, "mnist", data_dir="idx"), "idx", idx.replace("images-idx3", "labels-idx1")),
        Target("labels, idx, gzip", gz, "packed", partial(_images, "mnist", data_dir="packed"), "gzip", gz.replace("labels-idx1", "images-idx3")),
        Target(
            "images, CIFAR binary", "bin/cifar-10-batches-bin/data_batch_2.bin", "bin",
            partial(_images, "cifar10", data_dir="bin"), "binary", "npz/mnist.npz",
        ),
        Target(
            "images, CIFAR pickle", "py/cifar-10-batches-py/data_batch_2", "py",
            partial(_images, "cifar10", data_dir="py"), "pickle", "npz/mnist.npz",
        ),
        Target("play", "text/tinyshakespeare.txt", "text", partial(_load, "shakespeare", data_dir="text", clients=2), "text", "config.toml"),
        Target("tweets", "text/sentiment140_10k.csv.gz", "text", tweets, "gzip", "svm.gz"),
        Target("word vectors", "text/glove.txt", "text", partial(tweets, vectors="text/glove.txt"), "text", "config.toml"),
        Target("hospital", "heart/processed.va.data", "heart", partial(_load, "heart", data_dir="heart"), "csv", "tables/a.csv"),
    ]  # fmt: skip

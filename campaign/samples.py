"""Good files of every kind that the library reads, small."""

from __future__ import annotations

import bz2
import gzip
import os
import pickle
import random
import shutil
import signal
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fedsso.experiment.spec import CHECKPOINT, TRACE

from .faults import Files
from .forks import forked
from .scenes import SCENES, command, flower, from_tests, hospitals

PATIENCE = 120.0
DIGITS = ("--dataset", "digits", "--clients", 3)


def make(folder: Path) -> None:
    """Write all samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for work in (_runs, _half, _sweeps, _tunes, _models, _flowers, _settings):
        ended = forked(partial(_inside, folder, work), PATIENCE)
        if (ended.code and ended.code != -signal.SIGKILL) or ended.error:
            raise RuntimeError(f"{work.__name__}: {ended.error or ended.said}")
    _inside(folder, _data)


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


def _sweeps(name: str = "sweep") -> None:
    SCENES[name].begin(Path(name))
    first, second = sorted(Path(name, "parts").glob("*.npz"))[:2]
    Path(f"{name}-parts").write_text(f"{first}\n{second}\n")


def _tunes() -> None:
    _sweeps("tune")


def _models() -> None:
    """Tables of hospitals, their schema and two models, of which one has fewer columns."""
    shutil.copytree(hospitals().name, "hospitals")
    schema = from_tests("", "fits").SCHEMA.replace('unit = "years"', "fill = 60.5")
    Path("hospitals/schema.toml").write_text(f'missing = "median"\n{schema}')
    SCENES["glm"].begin(Path("glm"))
    shutil.copy("hospitals/Ulm.csv", "glm/new.csv")
    SCENES["glm over a model"].begin(Path("glm-other"))


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
    weights = {
        name: 0.1 * torch.randn(p.shape, generator=draw) for name, p in module.named_parameters()
    }
    save_file(weights, "init.safetensors")


def _data() -> None:
    import numpy as np

    draw = random.Random(0)
    Path("tables").mkdir()
    for name in ("a", "b"):
        rows = [
            f"{draw.gauss(50, 9):.1f},{draw.gauss(0, 1):.4f},{draw.randint(0, 1)}"
            for _ in range(30)
        ]
        Path("tables", f"{name}.csv").write_text("\n".join(["age,dose,sick", *rows]) + "\n")
    text = "".join(f"{draw.choice(('+1', '-1'))} {_entries(draw)}\n" for _ in range(40)).encode()
    for suffix, pack in (("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)):
        Path(f"svm{suffix}").write_bytes(pack(text))
    numbers = np.random.default_rng(0)
    x, y = (
        numbers.integers(0, 256, (60, 28, 28), np.uint8),
        numbers.integers(0, 10, 60).astype(np.uint8),
    )
    for name in ("npz", "npy"):
        Path(name).mkdir()
    np.savez_compressed("npz/mnist.npz", x=x, y=y)
    for name, array in (("x", x.astype(np.float32)), ("y", y), ("client", y % 3)):
        np.save(f"npy/{name}.npy", array)
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
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + bytes(array)


def _cifar(numbers: Any) -> None:
    from fedsso.data.images import CIFAR

    Path("bin/cifar-10-batches-bin").mkdir(parents=True)
    Path("py/cifar-10-batches-py").mkdir(parents=True)
    for name in CIFAR:
        x, y = numbers.integers(0, 256, (10, 3072), "uint8"), numbers.integers(0, 10, 10)
        records = b"".join(
            bytes([label]) + row.tobytes() for row, label in zip(x, y.tolist(), strict=True)
        )
        Path("bin/cifar-10-batches-bin", f"{name}.bin").write_bytes(records)
        Path("py/cifar-10-batches-py", name).write_bytes(
            pickle.dumps({b"data": x, b"labels": y.tolist()}, 2)
        )


def _texts(draw: random.Random) -> None:
    words = ["day", "great", "rain", "sun", "happy", "sad", "why", "now"]
    lines = [" ".join(draw.choices(words, k=9)) for _ in range(60)]
    Path("text").mkdir()
    Path("text/tinyshakespeare.txt").write_text(
        "".join(f"KING {i % 4}:\n{line}\n\n" for i, line in enumerate(lines))
    )
    tweets = [
        f'"{draw.choice((0, 4))}","{i}","now","NO","user{i % 5}","{line}"\n'
        for i, line in enumerate(lines)
    ]
    Path("text/sentiment140_10k.csv.gz").write_bytes(gzip.compress("".join(tweets).encode()))
    vectors = [" ".join([word, *(f"{draw.gauss(0, 1):.4f}" for _ in range(6))]) for word in words]
    Path("text/glove.txt").write_text("\n".join(vectors) + "\n")


def _hospitals(draw: random.Random) -> None:
    Path("heart").mkdir()
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [
            [f"{abs(draw.gauss(50, 9)):.1f}" for _ in range(13)] + [str(draw.randint(0, 4))]
            for _ in range(20)
        ]
        Path("heart", f"processed.{name}.data").write_text(
            "".join(",".join(row) + "\n" for row in rows)
        )

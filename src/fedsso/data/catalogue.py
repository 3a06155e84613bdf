"""The data sets: one entry makes a set exist in `load`, the command line and the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import integer, number, one_of
from .federation import Federation, split_options
from .images import (
    CIFAR,
    cifar_binary,
    cifar_pickle,
    cifar_tar,
    digits,
    emnist_balanced,
    emnist_digits,
    emnist_letters,
    idx,
    npz,
    npz_colour,
)
from .partition import PARTITIONS
from .pool import Pool
from .remotes import REMOTES
from .sources import SKEW, DataSet, Form, Wish, own_files, pooled, synthetic
from .tables import HOSPITALS, csv, heart, svmlight
from .text import sentiment140, shakespeare

IMAGE_MODELS = ("mclr", "mlp", "cnn", "cnn-small", "lenet")
EMNIST = "Cohen, Afshar, Tapson and van Schaik: EMNIST, from NIST Special Database 19"
LIBSVM = "Chang and Lin: LIBSVM Data"
IJCNN1 = ("ijcnn1.bz2", "ijcnn1.t.bz2"), ("ijcnn1", "ijcnn1.t")  # as they are offered first
A9A = ("a9a", "a9a.t"), ("a9a.bz2", "a9a.t.bz2")
PHISHING = ("phishing",), ("phishing.bz2",)


def _idx(folder: str, read: Callable[..., Pool], rows: int, start: str = "") -> tuple[Form, Form]:
    """The four official files of MNIST and its kin, as they come or unpacked; EMNIST's test part is
    not called t10k."""
    test = f"{start}test" if start else "t10k"
    parts = [
        (part, kind) for part in (f"{start}train", test) for kind in ("images-idx3", "labels-idx1")
    ]
    files = [f"{folder}/{part}-{kind}-ubyte" for part, kind in parts]
    return Form(tuple(f"{file}.gz" for file in files), read, rows), Form(tuple(files), read, rows)


def _emnist(
    part: str, title: str, rows: int, classes: int, read: Callable[..., Pool], *plain: Form
) -> DataSet:
    return DataSet(
        f"emnist_{part}",
        title,
        pooled,
        (*_idx("emnist", read, rows, f"emnist-{part}-"), *plain),
        classes=classes,
        partition="dirichlet",
        concentration=0.1,
        models=IMAGE_MODELS,
        remotes=REMOTES[f"emnist_{part}"],
        origin=EMNIST,
        licence="none stated",
    )


def _libsvm(
    name: str, title: str, rows: int, features: int, clients: int, *forms: tuple[str, ...]
) -> DataSet:
    def read(paths: Sequence[Path]) -> Pool:
        return svmlight(paths, dim=features)

    return DataSet(
        name,
        title,
        pooled,
        tuple(Form(files, read, rows) for files in forms),
        classes=2,
        partition="dirichlet",
        clients=clients,
        models=("mclr", "mlp"),
        remotes=REMOTES[name],
        origin=LIBSVM,
        licence="none stated",
    )


def load(
    name: str,
    *,
    clients: int | None = None,
    partition: str | None = None,
    min_rows: int = 8,
    test_fraction: float = 0.25,
    seed: int = 0,
    data_dir: str | Path | None = None,
    **options: object,
) -> Federation:
    """A federation from a named data set, the same for the same arguments.

    None means the set's default partition and number of clients. min_rows is a promise of the
    random partitions; the tables need none. Further options are the partition's (concentration,
    classes_per_client, shards_per_client) or the set's own: pixel_range of images; kind, dim,
    heterogeneity ... of synthetic; files and target of csv.

    >>> load("digits", clients=4, partition="iid")
    Federation(digits, 4 clients, 1349 train + 448 test rows, sample 1×8×8 uint8, 10 classes)
    """
    dataset = DATASETS[one_of("data set", name, DATASETS)]
    test_fraction, seed = split_options(test_fraction, seed)
    wish = Wish(
        clients=None if clients is None else integer("clients", clients, 1),
        partition=None if partition is None else one_of("partition", partition, PARTITIONS),
        skew={k: _like(k, options[k]) for k in SKEW if options.get(k) is not None},
        min_rows=integer("min_rows", min_rows, 1),
        test_fraction=test_fraction,
        seed=seed,
        data_dir=data_dir,
    )
    return dataset.build(dataset, wish, {k: v for k, v in options.items() if k not in SKEW})


def _like(name: str, value: object) -> float:
    """An option of a partition in the type of its default."""
    return integer(name, value) if isinstance(SKEW[name], int) else number(name, value)


def datasets() -> list[DataSet]:
    """Every data set there is."""
    return list(DATASETS.values())


DATASETS = {
    dataset.name: dataset
    for dataset in (
        DataSet(
            "digits",
            "8×8 handwritten digits",
            pooled,
            (Form((), digits, 1797),),
            classes=10,
            partition="dirichlet",
            concentration=0.1,
            models=("mclr", "mlp", "cnn", "cnn-small"),
            origin="UCI Optical Recognition of Handwritten Digits, shipped with scikit-learn",
            licence="CC BY 4.0",
        ),
        DataSet(
            "mnist",
            "28×28 handwritten digits, training and test images pooled",
            pooled,
            (*_idx("mnist", idx, 70000), Form(("mnist.npz",), npz, 70000)),
            classes=10,
            partition="paper-20",
            models=IMAGE_MODELS,
            remotes=REMOTES["mnist"],
            origin="LeCun, Cortes and Burges: MNIST",
            licence="CC BY-SA 3.0",
        ),
        DataSet(
            "fashion_mnist",
            "28×28 articles of clothing, training and test images pooled; the paper's “EMNIST”",
            pooled,
            (*_idx("fashion_mnist", idx, 70000), Form(("fashion_mnist.npz",), npz, 70000)),
            classes=10,
            partition="paper-fashion-3",
            models=IMAGE_MODELS,
            remotes=REMOTES["fashion_mnist"],
            origin="Zalando Research: Fashion-MNIST",
            licence="MIT",
        ),
        _emnist(
            "digits",
            "28×28 handwritten digits",
            280000,
            10,
            emnist_digits,
            Form(("emnist_digits.npz",), npz, 57918),
        ),
        _emnist(
            "letters",
            "28×28 handwritten letters, upper and lower case as one",
            145600,
            26,
            emnist_letters,
        ),
        _emnist(
            "balanced",
            "28×28 handwritten digits and letters, equally many of each",
            131600,
            47,
            emnist_balanced,
        ),
        DataSet(
            "cifar10",
            "32×32 colour photographs, training and test images pooled",
            pooled,
            (
                Form(
                    tuple(f"cifar-10-batches-bin/{name}.bin" for name in CIFAR), cifar_binary, 60000
                ),
                Form(tuple(f"cifar-10-batches-py/{name}" for name in CIFAR), cifar_pickle, 60000),
                Form(("cifar-10-binary.tar.gz",), cifar_tar, 60000),
                Form(("cifar-10-python.tar.gz",), cifar_tar, 60000),
                Form(("cifar10_20k.npz",), npz_colour, 20000),
            ),
            classes=10,
            partition="dirichlet",
            clients=10,
            models=("mclr", "mlp", "cnn-small", "lenet", "resnet20-gn"),
            remotes=REMOTES["cifar10"],
            origin="Krizhevsky: Learning Multiple Layers of Features from Tiny Images",
            licence="none stated",
        ),
        DataSet(
            "shakespeare",
            "next character of a play: 50 characters, one-hot, in pieces that do not overlap",
            pooled,
            (Form(("tinyshakespeare.txt",), shakespeare, 21870),),
            classes=65,
            partition="contiguous",
            clients=10,
            models=("mclr", "charmlp"),
            remotes=REMOTES["shakespeare"],
            origin="Karpathy: tiny Shakespeare",
            licence="public domain",
        ),
        DataSet(
            "sentiment140",
            "tweets, glad or sad: hashed bag of words, or the mean of GloVe vectors",
            pooled,
            (
                Form(
                    ("sentiment140/training.1600000.processed.noemoticon.csv",),
                    sentiment140,
                    1600000,
                ),
                Form(("sentiment140_10k.csv.gz",), sentiment140, 10001),
            ),
            classes=2,
            partition="contiguous",
            clients=10,
            models=("mclr", "textmlp"),
            trial={"rows": 1000},
            remotes=REMOTES["sentiment140"],
            origin="Go, Bhayani and Huang: Twitter Sentiment Classification using Distant Supervision",
            licence="for research; none stated",
        ),
        _libsvm("ijcnn1", "22 features of a running engine", 141691, 22, 3, *IJCNN1),
        _libsvm("a9a", "123 features of a person: a high income?", 48842, 123, 10, *A9A),
        _libsvm("phishing", "68 features of a web page: is it phishing?", 11055, 68, 10, *PHISHING),
        DataSet(
            "heart",
            "heart disease, 13 features of a patient, four hospitals",
            pooled,
            (Form(tuple(f"processed.{name}.data" for name in HOSPITALS), heart, 920),),
            classes=2,
            partition="group",
            remotes=REMOTES["heart"],
            origin="UCI Heart Disease: Janosi, Steinbrunn, Pfisterer and Detrano",
            licence="CC BY 4.0",
        ),
        DataSet(
            "synthetic",
            "quadratic or logistic problems with a known minimiser",
            synthetic,
            models=("linear",),
            origin="drawn from the seed",
        ),
        DataSet(
            "csv",
            "your own CSV tables, one file for each client: give files and target",
            own_files,
            (Form((), csv, suffix=".csv"),),
            partition="group",
            origin="yours",
        ),
        DataSet(
            "svmlight",
            "your own svmlight (LIBSVM) tables: give files",
            own_files,
            (Form((), svmlight),),
            partition="iid",
            origin="yours",
        ),
    )
}

"""The table of data sets. One entry here adds a set to `load`, the command line and the docs.

The official files of a set come first among its forms, because `fedsso data get` fetches these. The
other forms are what people have at hand: the same files unpacked, another version of them, or one
plain file with fewer rows. `DataSet` in `sources.py` explains every field.

The number of rows of a form is checked when a set is downloaded. Where a file with fewer rows is
read, a note tells the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

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
from .mapped.shards import npy
from .options import (
    BUCKETS,
    COLUMNS,
    FEATURES,
    FILES,
    GROUP,
    LAYOUT,
    OUTCOME,
    PIECE_LENGTH,
    PIXEL_RANGE,
    SAMPLED_ROWS,
    SCHEMA,
    STANDARDISE,
    TASK,
    TWEET_LENGTH,
    VECTORS,
)
from .pool import Pool
from .remotes import REMOTES
from .sources import DataSet, Form, own_files, pooled, synthetic
from .svmlight import svmlight
from .synthetic import SYNTHETIC_OPTIONS
from .tables import HOSPITALS, csv, heart
from .text import sentiment140, shakespeare

Reader = Callable[..., Pool]

# The models that are tried with grey images of 28×28 pixels.
IMAGE_MODELS = ("mclr", "mlp", "cnn", "cnn-small", "lenet")
# Where data sets come from, in the words of their makers.
EMNIST = "Cohen, Afshar, Tapson and van Schaik: EMNIST, from NIST Special Database 19"
LIBSVM = "Chang and Lin: LIBSVM Data"
SENTIMENT = "Go, Bhayani and Huang: Twitter Sentiment Classification using Distant Supervision"
TWEETS = "sentiment140/training.1600000.processed.noemoticon.csv"

# The forms of the LIBSVM sets. First comes the one that their server offers.
IJCNN1 = (
    ("ijcnn1.bz2", "ijcnn1.t.bz2"),
    ("ijcnn1", "ijcnn1.t"),
)
A9A = (
    ("a9a", "a9a.t"),
    ("a9a.bz2", "a9a.t.bz2"),
)
PHISHING = (
    ("phishing",),
    ("phishing.bz2",),
)


def _idx(folder: str, read: Reader, rows: int, start: str = "") -> tuple[Form, Form]:
    """The four official files of MNIST and its relatives, packed as they come, or unpacked.

    Args:
        folder: The folder of the files, below the data folder.
        read: Their reader.
        rows: How many images they hold, training and test images together.
        start: What the names of EMNIST begin with. Its test part is not called t10k.

    Returns:
        Two forms, with the files in the order that the readers want: images, labels, images,
        labels.
    """
    test = f"{start}test" if start else "t10k"
    files = []
    for part in (f"{start}train", test):
        files.append(f"{folder}/{part}-images-idx3-ubyte")
        files.append(f"{folder}/{part}-labels-idx1-ubyte")
    packed = [f"{file}.gz" for file in files]
    return Form(tuple(packed), read, rows), Form(tuple(files), read, rows)


def _emnist(
    part: str,
    title: str,
    rows: int,
    classes: int,
    read: Reader,
    *plain: Form,
) -> DataSet:
    """One of the three parts of EMNIST.

    Args:
        part: The name of the part: digits, letters or balanced.
        title: One line for people.
        rows: How many images it has.
        classes: How many classes it has.
        read: The reader of its official files.
        *plain: Forms beside the official files.
    """
    name = f"emnist_{part}"
    return DataSet(
        name,
        title,
        pooled,
        (*_idx("emnist", read, rows, f"emnist-{part}-"), *plain),
        options=(PIXEL_RANGE,),
        classes=classes,
        partition="dirichlet",
        concentration=0.1,
        models=IMAGE_MODELS,
        remotes=REMOTES[name],
        origin=EMNIST,
        licence="none stated",
    )


def _libsvm(
    name: str,
    title: str,
    rows: int,
    features: int,
    clients: int,
    forms: Sequence[tuple[str, ...]],
) -> DataSet:
    """A table with two classes from the LIBSVM collection.

    Args:
        name: The name of the data set.
        title: One line for people.
        rows: How many rows it has, training and test rows together.
        features: How many features a row has. The reader is told, since a file may lack the last
            ones.
        clients: The default number of clients.
        forms: The names of the files of each form.
    """

    def read(paths: Sequence[Path], *, layout: str | None = LAYOUT.default) -> Pool:
        return svmlight(paths, dim=features, layout=layout)

    return DataSet(
        name,
        title,
        pooled,
        tuple(Form(files, read, rows) for files in forms),
        options=(LAYOUT,),
        classes=2,
        partition="dirichlet",
        clients=clients,
        models=("mclr", "mlp"),
        remotes=REMOTES[name],
        origin=LIBSVM,
        licence="none stated",
    )


_LIST = (
    # ---- images ----
    #
    # The 1797 digits that come with scikit-learn need no download, so they are the default data
    # set. Twenty clients with few labels each are a hard but quick test.
    DataSet(
        "digits",
        "8×8 handwritten digits",
        pooled,
        (Form((), digits, 1797),),
        options=(PIXEL_RANGE,),
        classes=10,
        partition="dirichlet",
        concentration=0.1,
        models=("mclr", "mlp", "cnn", "cnn-small"),
        origin="UCI Optical Recognition of Handwritten Digits, shipped with scikit-learn",
        licence="CC BY 4.0",
    ),
    # By default MNIST is shared out over 20 clients, by the paper's own table of label counts.
    DataSet(
        "mnist",
        "28×28 handwritten digits, training and test images pooled",
        pooled,
        (*_idx("mnist", idx, 70000), Form(("mnist.npz",), npz, 70000)),
        options=(PIXEL_RANGE,),
        classes=10,
        partition="paper-20",
        models=IMAGE_MODELS,
        remotes=REMOTES["mnist"],
        origin="LeCun, Cortes and Burges: MNIST",
        licence="CC BY-SA 3.0",
    ),
    # The class counts, curves and numbers of parameters of the paper's "EMNIST" columns are those
    # of Fashion-MNIST. So the paper's table for them is the default here.
    DataSet(
        "fashion_mnist",
        "28×28 articles of clothing, training and test images pooled; the paper's “EMNIST”",
        pooled,
        (*_idx("fashion_mnist", idx, 70000), Form(("fashion_mnist.npz",), npz, 70000)),
        options=(PIXEL_RANGE,),
        classes=10,
        partition="paper-fashion-3",
        models=IMAGE_MODELS,
        remotes=REMOTES["fashion_mnist"],
        origin="Zalando Research: Fashion-MNIST",
        licence="MIT",
    ),
    # The three parts of EMNIST come in one archive. The last form of the digits is a plain file
    # with about a fifth of the rows.
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
        "28×28 handwritten letters, upper and lower case merged",
        145600,
        26,
        emnist_letters,
    ),
    _emnist(
        "balanced",
        "28×28 handwritten digits and letters, balanced",
        131600,
        47,
        emnist_balanced,
    ),
    # CIFAR-10 is offered as a binary and as a Python version. Both are read, unpacked or not. The
    # last form is a plain file with a third of the rows.
    DataSet(
        "cifar10",
        "32×32 colour photographs, training and test images pooled",
        pooled,
        (
            Form(
                tuple(f"cifar-10-batches-bin/{name}.bin" for name in CIFAR),
                cifar_binary,
                60000,
            ),
            Form(
                tuple(f"cifar-10-batches-py/{name}" for name in CIFAR),
                cifar_pickle,
                60000,
            ),
            Form(("cifar-10-binary.tar.gz",), cifar_tar, 60000),
            Form(("cifar-10-python.tar.gz",), cifar_tar, 60000),
            Form(("cifar10_20k.npz",), npz_colour, 20000),
        ),
        options=(PIXEL_RANGE,),
        classes=10,
        partition="dirichlet",
        clients=10,
        models=("mclr", "mlp", "cnn-small", "lenet", "resnet20-gn"),
        remotes=REMOTES["cifar10"],
        origin="Krizhevsky: Learning Multiple Layers of Features from Tiny Images",
        licence="none stated",
    ),
    # ---- text ----
    #
    # As in the paper, clients hold consecutive parts of a text, without shuffling.
    DataSet(
        "shakespeare",
        "next character of a play after 50 characters, one-hot, in non-overlapping pieces",
        pooled,
        (Form(("tinyshakespeare.txt",), shakespeare, 21870),),
        options=(PIECE_LENGTH,),
        classes=65,
        partition="contiguous",
        clients=10,
        models=("mclr", "charmlp"),
        remotes=REMOTES["shakespeare"],
        origin="Karpathy: tiny Shakespeare",
        licence="public domain",
    ),
    # The official file is sorted by label, so consecutive parts leave most clients with a single
    # label. A trial reading of a download takes 1000 of its 1.6 million rows.
    DataSet(
        "sentiment140",
        "tweets with positive or negative sentiment: hashed bag of words, or mean GloVe vector",
        pooled,
        (
            Form((TWEETS,), sentiment140, 1600000),
            Form(("sentiment140_10k.csv.gz",), sentiment140, 10001),
        ),
        options=(TWEET_LENGTH, BUCKETS, VECTORS, SAMPLED_ROWS),
        classes=2,
        partition="contiguous",
        clients=10,
        models=("mclr", "textmlp"),
        trial={"rows": 1000},
        remotes=REMOTES["sentiment140"],
        origin=SENTIMENT,
        licence="for research; none stated",
    ),
    # ---- tables ----
    #
    # The number of features is given for the LIBSVM sets, because a file may lack the last ones.
    # How the paper shares out ijcnn1 is not known. A Dirichlet draw over three clients stands in.
    _libsvm(
        "ijcnn1",
        "22 features of a running engine",
        rows=141691,
        features=22,
        clients=3,
        forms=IJCNN1,
    ),
    _libsvm(
        "a9a",
        "123 features of a person: is the income high?",
        rows=48842,
        features=123,
        clients=10,
        forms=A9A,
    ),
    _libsvm(
        "phishing",
        "68 features of a web page: is it phishing?",
        rows=11055,
        features=68,
        clients=10,
        forms=PHISHING,
    ),
    # The clients of heart disease are the four hospitals.
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
    # ---- made to measure, or brought by the user ----
    #
    # A synthetic problem knows its exact minimiser, which is good for tests of convergence.
    DataSet(
        "synthetic",
        "quadratic or logistic problems with a known minimiser",
        synthetic,
        options=SYNTHETIC_OPTIONS,
        models=("linear",),
        origin="drawn from the seed",
    ),
    # A CSV file is a hospital, so every file is a client by default. An svmlight file is not.
    DataSet(
        "csv",
        "your own CSV tables, one file per client: give files and outcome",
        own_files,
        (Form((), csv, suffix=".csv"),),
        options=(FILES, OUTCOME, SCHEMA, FEATURES, GROUP, TASK),
        partition="group",
        origin="yours",
    ),
    DataSet(
        "svmlight",
        "your own svmlight (LIBSVM) tables: give files",
        own_files,
        (Form((), svmlight),),
        options=(FILES, COLUMNS, LAYOUT),
        partition="iid",
        origin="yours",
    ),
    DataSet(
        "npy",
        "your own numpy files, which may be larger than memory: give a folder as files",
        own_files,
        (Form((), npy, suffix=".npy"),),
        options=(FILES, STANDARDISE),
        partition="group",
        origin="yours",
    ),
)

DATASETS = {dataset.name: dataset for dataset in _LIST}
"""Every data set by name."""

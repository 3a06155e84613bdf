"""The options of `fedsso.load`. Each one is declared here, once, as a record.

A record holds the option's name, its type, its default, its bounds, one sentence that explains it,
and the names that other libraries use for the same thing. Everything else is made from the records:
the defaults of the readers and partitions, the checks of values, the list of options that
`help(fedsso.load)` shows, the hint in an error about an unknown option, and the options of the
command line.

Two options choose from a registry: `partition` and `kind`. Their records stand beside that
registry, in `partition.py` and `synthetic.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import MOST, InputError, integer, number, one_of
from ..support.intake import user_path

BYTE = 255
"""The largest number that one byte holds."""


class Bounds(NamedTuple):
    """The numbers that an option may take: from `least` to `most`, except those in `without`.

    >>> fraction = Bounds("in [0, 1)", 0, 1, without=(1,))
    >>> fraction.hold(0.0), fraction.hold(1.0), fraction.hold(float("nan"))
    (True, False, False)
    """

    text: str
    """How an error states the bounds, after "must be"."""
    least: float
    most: float
    without: tuple[float, ...] = ()
    """Ends of the interval that do not belong to it."""

    def hold(self, value: float) -> bool:
        """Whether a number lies within the bounds."""
        return self.least <= value <= self.most and value not in self.without


@dataclass(frozen=True, eq=False)
class Option:
    """One option: what it is called, which values it takes, and what it does.

    `default` is the value of an option that is left out. None means that there is no fixed
    default: the data set decides. `also` lists what other libraries call this option, so that an
    error can tell their users the name it has here.

    >>> SEED.default, SEED.check(7)
    (0, 7)
    >>> TEST_FRACTION.check(1.5)
    Traceback (most recent call last):
    fedsso.errors.InputError: test_fraction must be in [0, 1), got test_fraction=1.5
    """

    name: str
    """The keyword of `load`, and the key in a settings file."""
    type: Any
    """int, float, str, Path, or a list of one of these."""
    default: Any
    """The value of an option that is left out."""
    doc: str
    """What the option does, in one or two sentences for users."""
    choices: tuple[str, ...] = ()
    """All values, if the option takes only a few words."""
    least: int | None = None
    """The smallest value of an integer. None: it has no bounds."""
    most: int = MOST
    """The largest value of an integer."""
    bounds: Bounds | None = None
    """The bounds of any other number."""
    also: tuple[str, ...] = ()
    """What other libraries call it."""
    hint: str = ""
    """A text that is added to an error about a number beyond the bounds."""
    former: tuple[str, ...] = ()
    """Names that it had before, which are still understood."""

    @property
    def plain_type(self) -> Any:
        """The type of a value in a settings file or on a command line, where a path is text."""
        plain: dict[Any, Any] = {Path: str, list[Path]: list[str]}
        return plain.get(self.type, self.type)

    def check(self, value: Any) -> Any:
        """Return the value in the type of the option. Raise InputError if it is not allowed.

        None is allowed where it is the default. Lists become tuples, paths become absolute. The
        message names the option, the bounds and the value, and it ends with `hint`.

        >>> FEATURES.check(["age", "dose"])
        ('age', 'dose')
        """
        if value is None and self.default is None:
            return None
        if self.choices:
            return one_of(self.name, value, self.choices)
        converted = self._converted(value)
        if self.bounds is not None and not self.bounds.hold(converted):
            hint = f"; {self.hint}" if self.hint else ""
            raise InputError(
                f"{self.name} must be {self.bounds.text}, got {self.name}={value}{hint}"
            )
        return converted

    def _converted(self, value: Any) -> Any:
        """The value in the type of the option. InputError if it has another type.

        Integers are checked against `least` and `most` here; `bounds` are checked by `check`.
        """
        if self.type is int:
            return integer(self.name, value, self.least, self.most)
        if self.type is float:
            return number(self.name, value)
        if self.type is Path:
            return Path(os.path.realpath(user_path(self.name, value)))
        if self.type == list[str]:
            return self._texts(value)
        if self.type == list[float]:
            return self._numbers(value)
        if not isinstance(value, str):
            raise InputError(f"{self.name} must be text, got {value!r}")
        return value

    def _texts(self, value: Any) -> tuple[str, ...]:
        """A list of names."""
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(isinstance(item, str) for item in value):
            raise InputError(f"{self.name} must be a list of names, got {value!r}")
        return tuple(value)

    def _numbers(self, value: Any) -> tuple[float, ...]:
        """A list of as many numbers as the default has."""
        count = len(self.default)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise InputError(f"{self.name} must be {count} numbers, got {value!r}")
        return tuple(number(self.name, item) for item in value)


def other_names(options: Iterable[Option]) -> dict[str, str]:
    """What other libraries call these options, mapped to the names they have here.

    >>> other_names([SEED])["random_state"]
    'seed'
    """
    found = {}
    for option in options:
        for other in option.also:
            found[other] = option.name
    return found


def with_current_names(
    given: Mapping[str, object],
    options: Iterable[Option],
) -> dict[str, object]:
    """The given values, those of former names by the names that the options have now.

    >>> with_current_names({"target": "ill"}, [OUTCOME])
    {'outcome': 'ill'}
    """
    current = {}
    for option in options:
        for name in option.former:
            current[name] = option.name
    found: dict[str, object] = {}
    for name, value in given.items():
        now = current.get(name, name)
        if now in found:
            raise InputError(f"{now} and its former name {name} are both given: leave out {name}")
        found[now] = value
    return found


# ---- options of every data set ----
#
# They are keywords of `load`. They say how many clients there are, which rows each of them gets,
# and which of its rows are kept for testing.

CLIENTS = Option(
    "clients",
    int,
    None,
    "Number of clients. By default, that of the data set.",
    least=1,
    also=(
        *("n_clients", "num_clients", "number_of_clients", "client_count"),
        *("nodes", "n_nodes", "num_nodes", "silos", "n_silos", "num_silos"),
        *("parties", "num_parties", "num_partitions", "workers", "num_workers"),
    ),
)
MIN_ROWS = Option(
    "min_rows",
    int,
    8,
    "Minimum number of rows per client. The partitions of the paper ignore it.",
    least=1,
    also=("min_size", "min_samples", "min_partition_size", "min_require_size"),
)
TEST_FRACTION = Option(
    "test_fraction",
    float,
    0.25,
    "Fraction of each client's rows that is held out for testing.",
    bounds=Bounds("in [0, 1)", 0, 1, without=(1,)),
    also=("test_size", "test_split", "test_ratio", "test_share"),
)
SEED = Option(
    "seed",
    int,
    0,
    "Seed of the partition and of the split into training and test rows.",
    bounds=Bounds("in -2**63..2**63-1, what 64 bits hold", -(2**63), 2**63 - 1),
    also=("random_state", "random_seed", "rng", "partition_seed"),
)
DATA_DIR = Option(
    "data_dir",
    Path,
    None,
    "Folder of the data files. By default $FEDSSO_DATA, or else ~/.cache/fedsso.",
    also=("root", "data_folder", "data_path", "folder", "cache_dir", "directory"),
)

# ---- options of some partitions ----
#
# They say how much the clients differ. `partition.py` knows which partition takes which.

CONCENTRATION = Option(
    "concentration",
    float,
    0.5,
    "Parameter of the Dirichlet draw. Small values make the clients very different. The default "
    "partition of digits and EMNIST uses 0.1.",
    bounds=Bounds("> 0 and <= 1e9", 0, 1e9, without=(0,)),
    also=("alpha", "beta", "dirichlet_alpha", "dirichlet_beta", "dir_alpha"),
    hint="0.1 is skewed, 100 nearly even",
)
# It has no bounds here, because they depend on the labels: the partition checks it.
CLASSES_PER_CLIENT = Option(
    "classes_per_client",
    int,
    2,
    "Number of different labels per client, at most that of the data set.",
    also=("num_classes", "n_classes", "classes", "num_classes_per_client", "labels_per_client"),
)
SHARDS_PER_CLIENT = Option(
    "shards_per_client",
    int,
    2,
    "Number of shards per client.",
    least=1,
    also=("num_shards", "n_shards", "shards", "num_shards_per_client"),
)
SKEW = (CONCENTRATION, CLASSES_PER_CLIENT, SHARDS_PER_CLIENT)
"""The options of partitions, beside min_rows."""

# ---- options of images ----
#
# Images are stored as bytes. A model sees them as numbers in a range.

# Two finite numbers, the first one smaller: the readers of images check that.
PIXEL_RANGE = Option(
    "pixel_range",
    list[float],
    (-1.0, 1.0),
    "Values of the darkest and the brightest pixel, as two numbers.",
    also=("range", "scale"),
)

# ---- options of text ----
#
# The first belongs to Shakespeare, the others to Sentiment140.

PIECE_LENGTH = Option(
    "length",
    int,
    50,
    "Number of characters that the model sees before the one it predicts.",
    least=1,
    also=("seq_len", "seq_length", "sequence_length"),
)
# At most 255 words count, so that one byte holds how often a word occurs.
TWEET_LENGTH = Option(
    "length",
    int,
    200,
    "Number of words of a tweet that are used. The rest is ignored.",
    least=1,
    most=BYTE,
    also=("max_len", "max_length", "seq_len"),
)
BUCKETS = Option(
    "buckets",
    int,
    1024,
    "Number of hash buckets for the words of a tweet. Ignored if `vectors` is given.",
    least=1,
    also=("n_features", "hash_size"),
)
VECTORS = Option(
    "vectors",
    Path,
    None,
    "Text file of GloVe word vectors. A tweet is then the mean vector of its words.",
    also=("glove", "embeddings"),
)
SAMPLED_ROWS = Option(
    "rows",
    int,
    0,
    "Number of tweets to draw from the file, the same ones each time. 0 uses all.",
    least=0,
    also=("n_rows", "num_rows", "n_samples", "num_samples", "nrows"),
)

# ---- options of your own files ----
#
# They belong to the data sets csv, svmlight and npy. All three take files.

# `check` does not know lists of paths: `sources.own_files` reads this option.
FILES = Option(
    "files",
    list[Path],
    None,
    "Your own files: one path, a list of paths, or a folder.",
    also=("path", "file", "paths", "filename", "filenames"),
)
OUTCOME = Option(
    "outcome",
    str,
    "",
    "Column to predict. Not needed with a schema, which names it.",
    also=("label", "labels", "y", "column", "target_column", "label_column", "response"),
    former=("target",),
)
SCHEMA = Option(
    "schema",
    Path,
    None,
    "File that describes the columns, for tables with text and missing values. "
    "`fedsso data schema` writes one.",
    also=("schema_file", "dictionary", "codebook"),
)
FEATURES = Option(
    "features",
    list[str],
    (),
    "Columns to use as features. By default all columns except the outcome and the group.",
    also=("columns", "feature_names", "x", "usecols"),
)
GROUP = Option(
    "group",
    str,
    "",
    "Column that says which client a row belongs to. By default, each file is one client.",
    also=("groups", "group_column", "client_column", "hospital", "site"),
)
TASK = Option(
    "task",
    str,
    "auto",
    "How to read numbers in the outcome column. auto: whole numbers are classes. regression: all "
    "numbers are real values.",
    choices=("auto", "regression"),
)
COLUMNS = Option(
    "dim",
    int,
    0,
    "Number of features. 0 uses the largest feature number in the files.",
    least=0,
    also=("n_features", "num_features", "dimension"),
)

LAYOUT = Option(
    "layout",
    str,
    None,
    "How rows are stored: dense, or sparse (for linear models only). By default sparse only if a "
    "dense table would exceed the limit of cells.",
    choices=("dense", "sparse"),
    also=("sparse", "format"),
)
STANDARDISE = Option(
    "standardise",
    str,
    "no",
    "Whether to impute missing values and scale the columns, using the training rows. Rows stay in "
    "their files and are scaled as they are read.",
    choices=("no", "yes"),
    also=("standardize", "normalise", "normalize", "scale"),
)

# ---- options of synthetic problems ----
#
# `synthetic.py` explains the problems, and knows which of them takes which option.

DIM = Option(
    "dim",
    int,
    20,
    "Number of variables of the problem.",
    least=1,
    also=("d", "dimension", "n_features", "num_features"),
)
HETEROGENEITY = Option(
    "heterogeneity",
    float,
    1.0,
    "How much the clients differ. 0 makes them identical.",
    bounds=Bounds(">= 0 and finite", 0, math.inf, without=(math.inf,)),
    also=("skew", "alpha", "beta"),
)
CONDITION = Option(
    "condition",
    float,
    100.0,
    "For quadratic problems: condition number of the matrices from which A is made.",
    bounds=Bounds(">= 1 and finite", 1, math.inf, without=(math.inf,)),
    also=("condition_number", "cond", "kappa"),
)
LOGISTIC_ROWS = Option(
    "rows",
    int,
    200,
    "For logistic problems: number of rows per client, training and test rows together.",
    least=1,
    also=("n_rows", "num_rows", "n_samples", "num_samples", "rows_per_client"),
)
# With half of the labels flipped, nothing is left to learn, and with more the classes are
# swapped.
NOISE = Option(
    "noise",
    float,
    0.1,
    "For logistic problems: fraction of the labels that are flipped.",
    bounds=Bounds("in [0, 0.5)", 0, 0.5, without=(0.5,)),
    also=("label_noise", "flip"),
)

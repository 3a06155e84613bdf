"""A federation: the rows of a data set, and which client holds which of them.

Every row is stored once, in the tensors `x` and `y`. A client is a list of row numbers, divided
into a training part and a test part. This makes it cheap to have thousands of clients, and to move
all data to a graphics card at once.

Symbols, as in the paper: there are N clients, client i has n_i training rows, and p_i is its weight
in the average that the server minimises. Unless weights are given, p_i = n_i / (n_1 + ... + n_N).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, integer, one_of
from ..support.sparse import entries, is_csr, stacked
from .arrays import (
    by_names,
    check_alike,
    check_finite,
    check_number_of_classes,
    check_same_length,
    checked_names,
    checked_pair,
    checked_samples,
    checked_targets,
    client_weights,
    dense,
    listed,
    pieces,
    rows_from,
)
from .mapped.rows import MappedRows
from .options import SEED, TEST_FRACTION
from .packing import (
    Held,
    checked_rows,
    count_labels,
    in_order,
    masks_by_client,
    rows_by_client,
    split,
)
from .scaling import Scaling, check_not_standardised, scaling_of, standardised
from .tables import MISSING, Files, SchemaLike, own_pool


@dataclass(frozen=True, eq=False)
class Federation:
    """Federated data: rows, and the client that each row belongs to.

    Do not call the class itself. Build a federation in one of these ways:

    - `fedsso.load` takes a data set by its name,
    - `Federation.from_clients` takes one pair (x, y) for each client,
    - `Federation.from_arrays` takes all rows, and the owner of each,
    - `Federation.from_rows` takes all rows, and a list of row numbers for each client,
    - `Federation.from_csv` reads one CSV file for each client.

    Each client's rows are divided into a training part and a test part, at random but always in
    the same way for the same seed. Every client keeps at least one row for training.

    With `standardise=True`, a table x [rows, features] is prepared for training. Missing values
    (NaN) become the median of their column, then columns are scaled to mean 0 and deviation 1.
    Medians, means and deviations are those of all clients' training rows together. In a real
    network, the clients would need two more averages for the means and deviations, and a few for a
    median.

    A federation is immutable. All its tensors are on the CPU until `to` moves them.

    Attributes:
        x: All samples, [rows, *sample]. Sparse rows are a tensor of layout CSR.
        y: One label or real target for each row, [rows].
        classes: The number of classes. 0 means that y is a real target.
        name: The name of the data set, or "own".
        source: The arguments with which `load` makes it again. Empty for arrays of your own.
        client_names: The names of the clients, where they have names.
        class_names: What each label stands for, where that is more than its number.
        notes: Sentences for the user, such as how many rows were left out.
        scaling: Prepares new rows for the trained model, where a table was standardised.
        optimum: The exact minimiser of the objective, where it is known.

    >>> north = ([[0.0], [1.0]], [0, 1])
    >>> south = ([[2.0]], [1])
    >>> Federation.from_clients([north, south], test_fraction=0)
    Federation(own, 2 clients, 3 train + 0 test rows, sample 1 float64, 2 classes)
    """

    # All samples, [rows, *sample], uint8 or floating; sparse rows in layout CSR.
    x: Tensor
    # One label (int64) or one real target (floating) for each row, [rows].
    y: Tensor
    # Client i trains on the rows train_rows[train_start[i]:train_start[i + 1]].
    train_rows: Tensor
    # Where each client begins in train_rows, [N + 1], beginning with 0.
    train_start: Tensor
    # Client i is tested on the rows test_rows[test_start[i]:test_start[i + 1]].
    test_rows: Tensor
    # Where each client begins in test_rows, [N + 1], beginning with 0.
    test_start: Tensor
    # The number of classes. 0 means that y is a real target.
    classes: int = 0
    # A model sees x * affine[0] + affine[1], computed in floating point. Images use it.
    affine: tuple[float, float] = (1.0, 0.0)
    # The user's own p_i, float64 [N]. None means that p_i is the client's share of the rows.
    weights: Tensor | None = None
    # The name of the data set, or "own".
    name: str = "own"
    # The arguments with which `load` makes this federation again. Empty for a user's own arrays.
    source: Mapping[str, object] = field(default_factory=dict)
    # The names of the clients, where they have names.
    client_names: tuple[str, ...] = ()
    # What each label stands for, where that is more than its number.
    class_names: tuple[str, ...] = ()
    # What a user should know, such as rows that were left out or moved to another client.
    notes: tuple[str, ...] = ()
    # Of a standardised table: call it to prepare new rows for the trained model.
    scaling: Scaling | None = None
    # The exact minimiser of p_1 f_1 + ... + p_N f_N, float64, where it is known.
    optimum: Tensor | None = None

    # ---- ways to build one ----

    @classmethod
    def from_rows(
        cls,
        x: Any,
        y: Any,
        rows: Iterable[Any],
        *,
        test_fraction: float = TEST_FRACTION.default,
        seed: int = SEED.default,
        classes: int | None = None,
        standardise: bool = False,
    ) -> Federation:
        """Build a federation from all rows and, for each client, the numbers of its rows.

        Args:
            x: The samples: [rows, features] for a table, [rows, channels, height, width] for
                images, or any other shape that your model takes. Lists, numpy arrays, data frames
                and tensors are accepted. Floats and uint8 keep their type, other integers become
                float32. A sparse matrix of scipy or torch stays sparse, for linear models.
            y: One label or target for each row, [rows]. Integers are labels, numbered from 0.
                Floats are real targets, unless `classes` is given.
            rows: For each client the list of its row numbers, or a mask of booleans with one entry
                for each row. A row may belong to one client or to none, but not to two.
            test_fraction: The share of each client's rows that is kept for testing.
            seed: Decides which rows these are.
            classes: The number of classes. By default the largest label + 1.
            standardise: Whether to fill gaps in a table and to scale its columns.

        Returns:
            The federation. Its clients are numbered in the order of `rows`.

        Raises:
            InputError: The arrays do not fit together, or hold NaN or infinite numbers. The message
                names the first wrong row.

        >>> x = [[0.0], [1.0], [2.0], [3.0]]
        >>> fed = Federation.from_rows(x, [0, 1, 0, 1], [[0, 1], [2, 3]], test_fraction=0)
        >>> fed.clients
        2
        """
        test_fraction = TEST_FRACTION.check(test_fraction)
        seed = SEED.check(seed)
        samples = rows_from(x, "x")
        targets = dense(y, "y")
        check_same_length(samples, targets)
        check_not_standardised(samples, standardise)
        samples = checked_samples(samples, gaps=standardise)
        targets, count = checked_targets(targets, classes)
        check_number_of_classes(count, len(targets))
        if not count:
            targets = _in_precision_of(samples, targets)
        if isinstance(rows, Held):
            held = rows
        else:
            lists = listed(rows, "rows must list the row indices of each client")
            held = checked_rows(lists, len(samples))
        train, test = split(held, test_fraction, seed)
        # The split comes first: what is learned from the test rows would make them look too easy.
        scaling = None
        if standardise:
            scaling = scaling_of(samples, train.rows)
            samples = standardised(samples, scaling)
        return cls(
            samples,
            targets,
            train.rows,
            train.start,
            test.rows,
            test.start,
            classes=count,
            scaling=scaling,
        )

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client_of_row: Any,
        *,
        test_fraction: float = TEST_FRACTION.default,
        seed: int = SEED.default,
        classes: int | None = None,
        weights: Any = None,
        standardise: bool = False,
    ) -> Federation:
        """Build a federation from all rows and the owner of each row.

        Arrays whose type need not change are shared with the caller, not copied. Samples that are
        mapped from a file (`np.load(path, mmap_mode="r")`) stay there and may be larger than
        memory: a row is read when it is needed.

        Args:
            x: The samples, as in `from_rows`.
            y: The labels or targets, as in `from_rows`.
            client_of_row: The client of each row, [rows]: an integer, or a name.
            test_fraction: The share of each client's rows that is kept for testing.
            seed: Decides which rows these are.
            classes: The number of classes. By default the largest label + 1.
            weights: Your own client weights p_i, in the sorted order of the clients, summing to 1.
            standardise: Whether to fill gaps in a table and to scale its columns.

        Returns:
            The federation. Its clients come in sorted order, and `client_names` has their names.

        Raises:
            InputError: The arrays do not fit together, hold NaN or infinite numbers, or the
                weights are negative or do not sum to 1. The message names the first wrong row.

        >>> x = [[36.6], [39.1], [37.0]]
        >>> fed = Federation.from_arrays(x, [0, 1, 0], ["Ulm", "Graz", "Ulm"], test_fraction=0)
        >>> fed.client_names
        ('Graz', 'Ulm')
        """
        samples = rows_from(x, "x")
        targets = dense(y, "y")
        check_same_length(samples, targets)
        names, rows = rows_by_client(client_of_row, len(samples))
        fed = cls.from_rows(
            samples,
            targets,
            rows,
            test_fraction=test_fraction,
            seed=seed,
            classes=classes,
            standardise=standardise,
        )
        p = client_weights(weights, len(names))
        return replace(fed, client_names=names, weights=p)

    @classmethod
    def from_clients(
        cls,
        clients: Iterable[tuple[Any, Any]],
        *,
        test_fraction: float = TEST_FRACTION.default,
        seed: int = SEED.default,
        client_names: Sequence[str] = (),
        classes: int | None = None,
        weights: Any = None,
        standardise: bool = False,
    ) -> Federation:
        """Build a federation from one pair (x, y) for each client.

        The clients may have different numbers of rows, but their samples must have the same shape.
        The columns of data frames are joined by their names, in the order of the first.

        Args:
            clients: The pairs, one for each client. x and y are as in `from_rows`.
            test_fraction: The share of each client's rows that is kept for testing.
            seed: Decides which rows these are.
            client_names: A name for each client, for tables and plots.
            classes: The number of classes. By default the largest label of all clients + 1.
            weights: Your own client weights p_i, one for each client, summing to 1.
            standardise: Whether to fill gaps in a table and to scale its columns.

        Returns:
            The federation. Its clients come in the order of the pairs.

        Raises:
            InputError: The pairs do not fit together, hold NaN or infinite numbers, or the
                weights are negative or do not sum to 1. The message names the client and its
                first wrong row.

        >>> pairs = [([[36.6], [39.1]], [0, 1]), ([[37.0], [38.5]], [0, 1])]
        >>> fed = Federation.from_clients(pairs, client_names=["Ulm", "Graz"], test_fraction=0.5)
        >>> fed.train_sizes.tolist(), fed.test_sizes.tolist()
        ([1, 1], [1, 1])
        """
        given = by_names(listed(clients, "clients must be one pair (x, y) per client"))
        pairs = []
        for client, pair in enumerate(given):
            pairs.append(checked_pair(pair, client, classes, standardise, rows_from))
        check_alike(pairs)
        names = checked_names(client_names, len(pairs))
        every = [samples for samples, _ in pairs]
        x = stacked(every) if is_csr(every[0]) else torch.cat(every)
        y = torch.cat([targets for _, targets in pairs])
        sizes = [len(targets) for _, targets in pairs]
        fed = cls.from_rows(
            x,
            y,
            in_order(sizes),
            test_fraction=test_fraction,
            seed=seed,
            classes=classes,
            standardise=standardise,
        )
        p = client_weights(weights, len(pairs))
        return replace(fed, client_names=names, weights=p)

    @classmethod
    def from_csv(
        cls,
        files: Files,
        outcome: str = "",
        *,
        schema: SchemaLike | None = None,
        features: Sequence[str] | None = None,
        group: str = "",
        missing: Sequence[str] = MISSING,
        standardise: bool = True,
        test_fraction: float = TEST_FRACTION.default,
        seed: int = SEED.default,
        classes: int | None = None,
        target: str = "",
    ) -> Federation:
        """Build a federation from CSV files, one for each client.

        The first line of a file names its columns. Commas, semicolons or tabs separate the cells.
        All files must have the same columns, in any order. Without a schema all columns but the
        outcome hold numbers.

        Args:
            files: A folder, a list of paths, or a dictionary {client's name: path}.
            outcome: The name of the column to predict. Outcomes that are names, or that are all
                whole numbers, are labels. They are numbered from 0 in sorted order. A schema names
                it by itself.
            schema: What the columns mean, for tables with text: the path of a file that
                `fedsso data schema` wrote, or its text. Features are then the columns of 0 and 1,
                and the numbers, that the schema makes of a table.
            features: The names of the columns to learn from. By default all other columns of the
                first file.
            group: The name of a column that says which client a row belongs to. By default, one
                file is one client.
            missing: The texts that mark a gap.
            standardise: Whether to fill gaps and to scale columns. It is on by default.
            test_fraction: The share of each client's rows that is kept for testing.
            seed: Decides which rows these are.
            classes: 0 takes numbers as real targets. n takes labels from 0 to n - 1 as they are
                written.
            target: The former name of `outcome`.

        Returns:
            The federation. `fed.scaling(rows)` prepares new rows for the trained model.

        Raises:
            InputError: A file cannot be read. The message names the file, the line and the column.

        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for city in ("Graz", "Ulm"):
        ...     _ = (folder / f"{city}.csv").write_text("age,ill\\n63,yes\\n48,no\\n")
        >>> Federation.from_csv(folder, "ill", test_fraction=0)
        Federation(own, 2 clients, 4 train + 0 test rows, sample 1 float32, 2 classes)
        """
        pool = own_pool(files, outcome or target, schema, features, missing, classes, group)
        assert pool.group is not None
        names, rows = masks_by_client(pool.group)
        fed = cls.from_rows(
            pool.x,
            pool.y,
            rows,
            # With 0, the pool holds real targets already.
            classes=classes or None,
            test_fraction=test_fraction,
            seed=seed,
            standardise=standardise,
        )
        named = fed.with_columns(pool.columns, pool.units)
        return replace(
            named,
            client_names=names,
            class_names=pool.class_names,
            notes=pool.notes,
        )

    # ---- what it holds ----

    @property
    def clients(self) -> int:
        """The number of clients, N."""
        return len(self.train_start) - 1

    @property
    def train_sizes(self) -> Tensor:
        """The number of training rows of each client, n_i, int64 [N].

        >>> pairs = [([[0.0]] * 4, [0] * 4), ([[0.0]] * 8, [1] * 8)]
        >>> Federation.from_clients(pairs).train_sizes
        tensor([3, 6])
        """
        return self.train_start.diff()

    @property
    def test_sizes(self) -> Tensor:
        """The number of test rows of each client, int64 [N]. It may be 0.

        >>> pairs = [([[0.0]] * 4, [0] * 4), ([[0.0]], [1])]
        >>> Federation.from_clients(pairs).test_sizes
        tensor([1, 0])
        """
        return self.test_start.diff()

    @property
    def p(self) -> Tensor:
        """The weight of each client in the objective, p_i, float64 [N]. They sum to 1.

        The server minimises p_1 f_1(x) + ... + p_N f_N(x), where f_i is the mean loss over the
        training rows of client i. Unless weights are given, every row counts the same.

        >>> pairs = [([[0.0]] * 3, [0, 0, 1]), ([[0.0]], [1])]
        >>> Federation.from_clients(pairs, test_fraction=0).p.tolist()
        [0.75, 0.25]
        """
        if self.weights is not None:
            return self.weights
        sizes = self.train_sizes.double()
        return sizes / sizes.sum()

    @property
    def sample_shape(self) -> torch.Size:
        """The shape of one sample, for example (1, 28, 28): channels, height, width."""
        return self.x.shape[1:]

    @property
    def is_sparse(self) -> bool:
        """Whether the rows are sparse: x then has the layout CSR."""
        return is_csr(self.x)

    @property
    def labels(self) -> tuple[str, ...]:
        """What each label is called: its name where it has one, else its number.

        >>> Federation.from_clients([([[0.0], [1.0]], [0, 1])]).labels
        ('0', '1')
        """
        numbers = tuple(map(str, range(self.classes)))
        return self.class_names + numbers[len(self.class_names) :]

    def rows_of(self, i: int, part: str = "train") -> Tensor:
        """The row numbers of client i, int64, in random order.

        Use them as an index of `x` and `y`: `fed.x[fed.rows_of(3)]` are the training samples of
        client 3.

        Args:
            i: The number of the client, from 0 to N - 1.
            part: "train" or "test".

        Returns:
            The row numbers, [rows of the client]. There may be no test rows.

        Raises:
            InputError: There is no such client, or no such part.

        >>> fed = Federation.from_clients([([[0.0], [1.0]], [0, 1])], test_fraction=0)
        >>> sorted(fed.rows_of(0).tolist())
        [0, 1]
        """
        parts = {
            "train": (self.train_rows, self.train_start),
            "test": (self.test_rows, self.test_start),
        }
        rows, start = parts[one_of("part", part, parts)]
        if not 0 <= integer("client", i) < self.clients:
            raise InputError(f"client must be in 0..{self.clients - 1}, got {i}")
        return rows[int(start[i]) : int(start[i + 1])]

    def label_counts(self) -> Tensor:
        """How many rows of each label each client holds, int64 [N, classes].

        Training and test rows are counted together.

        Raises:
            InputError: The targets are real numbers, so there are no labels to count.

        >>> pairs = [([[0.0]] * 3, [0, 0, 1]), ([[0.0]] * 2, [1, 1])]
        >>> Federation.from_clients(pairs).label_counts().tolist()
        [[2, 1], [0, 2]]
        """
        if not self.classes:
            raise InputError(f"federation {self.name!r} has real targets, no labels to count")
        train = count_labels(self.y, self.train_rows, self.train_start, self.classes)
        test = count_labels(self.y, self.test_rows, self.test_start, self.classes)
        return train + test

    def summary(self) -> str:
        """Describe the federation in a few lines of plain text: sizes, labels, skew and notes.

        >>> pairs = [([[0.0]] * 4, [0, 0, 0, 1]), ([[0.0]] * 8, [1] * 8)]
        >>> print(Federation.from_clients(pairs).summary())
        Federation(own, 2 clients, 9 train + 3 test rows, sample 1 float64, 2 classes)
        per client         min    median       max
        train rows           3       4.5         6
        test rows            1       1.5         2
        labels held          1       1.5         2
        label skew  0.375  (0: all alike, near 1: disjoint)
        """
        lines = [
            repr(self),
            f"{'per client':<12}{'min':>10}{'median':>10}{'max':>10}",
            _spread("train rows", self.train_sizes),
            _spread("test rows", self.test_sizes),
        ]
        if self.classes:
            counts = self.label_counts()
            skew = float(label_skew(counts).mean())
            lines.append(_spread("labels held", (counts > 0).sum(1)))
            lines.append(f"label skew  {skew:.3f}  (0: all alike, near 1: disjoint)")
        for note in self.notes:
            lines.append(f"note: {note}")
        return "\n".join(lines)

    def digest(self) -> str:
        """A SHA-256 of everything that training can see: rows, their holders, scaling, weights.

        Two federations with the same digest give the same results. Names, notes and the source do
        not count. The digest is the same on every machine, so a run can be continued elsewhere: it
        keeps the digest, and refuses other data.

        Returns:
            64 hexadecimal digits.

        >>> one = Federation.from_clients([([[0.0]], [0])], client_names=["a"])
        >>> two = Federation.from_clients([([[0.0]], [0])], client_names=["b"])
        >>> one.digest() == two.digest()
        True
        """
        hasher = sha256(repr((self.affine, self.classes)).encode())
        if self.is_sparse:
            hasher.update(f"sparse{tuple(self.x.shape)}".encode())
        arrays = [
            *(entries(self.x) if self.is_sparse else [self.x]),
            self.y,
            self.train_rows,
            self.train_start,
            self.test_rows,
            self.test_start,
        ]
        if self.weights is not None:
            arrays.append(self.weights)
        for array in arrays:
            # Without type and shape, the same bytes could stand for different arrays.
            hasher.update(f"{array.dtype}{tuple(array.shape)}".encode())
            for piece in pieces(array):
                flat = piece.detach().cpu().contiguous().flatten()
                hasher.update(flat.view(torch.uint8).numpy().data)
        return hasher.hexdigest()

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.sample_shape))
        dtype = str(self.x.dtype).removeprefix("torch.") + " sparse" * self.is_sparse
        target = f"{self.classes} classes" if self.classes else "real target"
        rows = f"{len(self.train_rows)} train + {len(self.test_rows)} test rows"
        sample = f"sample {shape} {dtype}"
        return f"Federation({self.name}, {self.clients} clients, {rows}, {sample}, {target})"

    # ---- variants of it ----

    def validation(self, fraction: float = 0.25, seed: int = 0) -> Federation:
        """The same clients, tested on a part of their training rows instead of their test rows.

        Use it to choose settings without looking at the test rows, as `fedsso.sweep` does with
        `select="val"`. The test rows of this federation are left out altogether.

        Args:
            fraction: The share of each client's training rows that is held out, in [0, 1).
            seed: Decides which rows these are.

        Returns:
            A federation with the same rows in x and y. Its `source` is empty, because `load` cannot
            make it, and its optimum is not known.

        Raises:
            InputError: The fraction is not in [0, 1).

        >>> fed = Federation.from_clients([([[0.0]] * 16, [0] * 16)])
        >>> fed.validation()
        Federation(own, 1 clients, 9 train + 3 test rows, sample 1 float64, 1 classes)
        """
        fraction = TEST_FRACTION.check(fraction)
        seed = SEED.check(seed)
        train, test = split(Held(self.train_rows, self.train_start), fraction, seed)
        return replace(
            self,
            train_rows=train.rows,
            train_start=train.start,
            test_rows=test.rows,
            test_start=test.start,
            source={},
            optimum=None,
        )

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with every tensor on a device, for example "cuda".

        `fedsso.simulate` does it by itself. Training is faster if the data are where the model is.
        `scaling` stays on the CPU, because it prepares rows that come from outside.

        Args:
            device: A device of torch, or its name.

        Returns:
            A new federation. Tensors that are on the device already are shared, not copied.

        >>> fed = Federation.from_clients([([[0.0]], [0])])
        >>> fed.to("cpu").x.device
        device(type='cpu')
        """
        moved: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Tensor) and not isinstance(value, MappedRows):
                moved[one.name] = value.to(device)
        return replace(self, **moved)

    def with_columns(self, columns: tuple[str, ...], units: tuple[str, ...] = ()) -> Federation:
        """The same federation, whose scaling knows the names of the table's columns.

        `fed.scaling(frame)` can then read a data frame by these names, in any order of its
        columns. A federation without a scaling is returned as it is. `columns` has a name for
        each feature, `units` a unit, or nothing at all.
        """
        if self.scaling is None:
            return self
        named = self.scaling._replace(columns=columns, units=units)
        return replace(self, scaling=named)


def label_skew(counts: Tensor) -> Tensor:
    """How far each client's mix of labels is from that of all clients together, float64 [N].

    It is the total-variation distance: half the sum over the labels of |own share - share of
    all|. It is 0 for the same mix, and near 1 for a client with labels that nobody else has.

    Args:
        counts: What `Federation.label_counts` returns, [N, classes].

    Returns:
        One number in [0, 1) for each client.

    >>> label_skew(torch.tensor([[1, 0], [0, 1]])).tolist()
    [0.5, 0.5]
    """
    share = counts.double()
    own = share / share.sum(1, keepdim=True)
    everyone = share.sum(0) / share.sum()
    return (own - everyone).abs().sum(1) / 2


def _in_precision_of(samples: Tensor, targets: Tensor) -> Tensor:
    """Real targets in the type of the samples, because a loss compares both in one precision.

    Images are stored as bytes, so their targets are float32. InputError if a target is too large
    for it.
    """
    dtype = samples.dtype if samples.is_floating_point() else torch.float32
    converted = targets.to(dtype)
    check_finite(converted, f"y as {dtype}")
    return converted


def _spread(title: str, values: Tensor) -> str:
    """A line of the summary: the least, the median and the largest of some numbers."""
    points = torch.tensor([0, 0.5, 1]).double()
    least, median, most = values.cpu().double().quantile(points).tolist()
    return f"{title:<12}{least:>10.0f}{median:>10g}{most:>10.0f}"

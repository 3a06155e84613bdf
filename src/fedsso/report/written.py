"""A table of settings as it goes into a paper: Markdown, LaTeX, CSV or a data frame.

`table` makes it from curves. `Results.table` calls it, and so does `fedsso report --tables`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..errors import unknown
from ..experiment.trace import LOSS
from ..support import latex
from ..support.files import to_csv, write_atomic
from .tables import (
    ENDS,
    FINAL,
    FINAL_LOSS,
    best_value,
    cell_values,
    markdown,
    numbers,
    remarks,
    rounds_table,
    statistic,
)

if TYPE_CHECKING:
    import pandas as pd

    from .tables import Cell, Curve, Numbers, Stat

ROUNDS = "rounds to "  # what the name of a target's column begins with
MARKS = {
    ".tex": "% needs \\usepackage{booktabs}",
    ".md": "| algorithm |",
    ".csv": "algorithm,seeds,diverged,",
}
"""What every table of a format begins with, by the suffix of its file."""


class _Line(NamedTuple):
    """One setting: its cells as text by the names of the columns, and the same as numbers."""

    cells: Mapping[str, str]
    numbers: Numbers
    end: Stat  # of the last column: the final accuracy, or the final test loss

    @property
    def values(self) -> list[Cell]:
        """What the cells are compared by."""
        return cell_values(self.numbers, self.end["mean"])


class Table(str):
    """Rounds and megabytes to target accuracies, and the accuracy at the end: a row each setting.

    It is a text, the table in Markdown, and can be printed and written as such. The same numbers
    are there for LaTeX, as CSV and as a data frame.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> table = fedsso.compare(fed, "mclr", ["fedsso", "fedavg"], rounds=5).table([0.5])
    >>> table.names
    ['algorithm', 'rounds to 0.50', 'megabytes', 'final accuracy']
    >>> table.to_pandas()["rounds to 0.50"].tolist()
    [1.0, 1.0]

    Attributes:
        notes: What a reader should know, such as why there is no deviation over the seeds.
    """

    notes: tuple[str, ...]
    _lines: tuple[_Line, ...]

    def __new__(
        cls,
        lines: Sequence[_Line],
        notes: Sequence[str] = (),
    ) -> Self:
        """The table of some lines, which `table` makes."""
        made = super().__new__(cls, markdown([line.cells for line in lines]))
        made.notes = tuple(notes)
        made._lines = tuple(lines)
        return made

    def _repr_markdown_(self) -> str:
        """The table as a notebook shows it."""
        return str(self)

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self._lines[0].cells) if self._lines else []

    def to_markdown(self, path: str | Path = "") -> str:
        """The table in Markdown, with its notes below; written to `path`, if given."""
        told = "".join(f"\n{note}\n" for note in self.notes)
        return _written(path, f"{self}{told}")

    def to_latex(
        self,
        path: str | Path = "",
        *,
        bold: bool = True,
    ) -> str:
        """The table for LaTeX, as a `tabular` with the rules of the package booktabs.

        Caption, label and place are for the paper, in which the file is read by `\\input`.

        Args:
            path: A file to write, which is replaced; empty: none.
            bold: Whether the best of each column is printed in bold letters.
        """
        names = self.names
        targets = [name for name in names if name.startswith(ROUNDS)]
        heads = []
        for name in names:
            short = name.removeprefix(ROUNDS).capitalize()
            heads.append(latex.escaped(short))
        above = []
        if targets:
            # One head above the targets, which are then numbers alone.
            others = " &" * (len(names) - 1 - len(targets))
            span = rf"\multicolumn{{{len(targets)}}}{{c}}{{Rounds to accuracy}}"
            above.append(rf" & {span}{others} \\")
            above.append(rf"\cmidrule(lr){{2-{1 + len(targets)}}}")
        best = self._best() if bold else [None] * len(names)
        rows = [_latex_cells(line, best) for line in self._lines]
        notes = [self._final(), *self.notes]
        text = latex.tabular(heads, rows, notes=notes, above=above)
        return _written(path, text)

    def to_csv(self, path: str | Path = "") -> str:
        """The numbers as CSV, in full; written to `path`, if given.

        Every mean is followed by the sample standard deviation over the seeds. A cell is empty
        where there is no number: a target that not every seed reaches, the deviation of one seed.
        """
        rows = [self._columns(), *(self._values(line) for line in self._lines)]
        return _written(path, to_csv(rows))

    def to_pandas(self) -> pd.DataFrame:
        """The numbers as a data frame, a row for each setting; it needs the package pandas.

        The deviation of a column is in the column of the same name with "sd" behind it.
        """
        import pandas as pd

        rows = [self._values(line) for line in self._lines]
        frame = pd.DataFrame(rows, columns=self._columns())
        # A column without any number would hold None.
        kinds = dict.fromkeys(frame.columns[3:], float)
        return frame.astype(kinds)

    def _final(self) -> str:
        """What the last column means, in a sentence."""
        name = self.names[-1] if self._lines else FINAL
        return f"{name.capitalize()}: {ENDS}."

    def _best(self) -> list[float | None]:
        """The best value of each column."""
        found = []
        for place, name in enumerate(self.names):
            values = [line.values[place] for line in self._lines]
            found.append(best_value(name, values))
        return found

    def _columns(self) -> list[str]:
        """The names of the columns of numbers."""
        columns = ["algorithm", "seeds", "diverged"]
        for name in self.names[1:]:
            columns += [name, f"{name} sd"]
            if name == "megabytes":
                columns.append("megabytes to accuracy")
        return columns

    def _values(self, line: _Line) -> list[Any]:
        """The numbers of a line, in the order of `_columns`."""
        one = line.numbers
        row: list[Any] = [one["label"], one["seeds"], len(one["diverged"])]
        for stat in one["rounds_to"].values():
            if stat["count"] == one["seeds"]:
                row += [stat["mean"], stat["sd"]]
            else:
                row += [None, None]
        cost = one["megabytes"]
        if cost is None:
            row += [None, None, None]
        else:
            row += [cost["mean"], cost["sd"], cost["target"]]
        return [*row, line.end["mean"], line.end["sd"]]


def _latex_cells(line: _Line, best: Sequence[float | None]) -> list[str]:
    """The cells of a line for LaTeX; what is the best of its column is in bold letters."""
    found = []
    for text, value, top in zip(line.cells.values(), line.values, best, strict=True):
        cell = latex.escaped(text)
        is_best = top is not None and value == top
        found.append(latex.bold(cell) if is_best else cell)
    return found


def table(curves: Sequence[Curve], targets: Sequence[float]) -> Table:
    """The table of some settings.

    Args:
        curves: The settings, each with at least one trace.
        targets: Accuracies in (0, 1], in any order.
    """
    rows = rounds_table(curves, targets)
    lines = []
    every = numbers(curves, targets)
    for curve, row, one in zip(curves, rows, every, strict=True):
        end = one["final_accuracy"]
        if FINAL_LOSS in row:
            end = statistic(curve.ends(LOSS))
        lines.append(_Line(row, one, end))
    return Table(lines, remarks(curves, rows))


def write(path: Path, found: Table) -> None:
    """Write a table to a file; the suffix decides between LaTeX, Markdown and CSV.

    Raises:
        InputError: The suffix is another one, or the file cannot be written.
    """
    formats = {".tex": found.to_latex, ".md": found.to_markdown, ".csv": found.to_csv}
    suffix = check_suffix(path)
    formats[suffix](path)


def check_suffix(path: Path) -> str:
    """The suffix of a table's file; one that is not known is refused."""
    suffix = path.suffix.lower()
    if suffix not in MARKS:
        raise unknown("format of a table", suffix, MARKS)
    return suffix


def _written(path: str | Path, text: str) -> str:
    """The text, also in a file if there is to be one."""
    if path:
        write_atomic(path, text)
    return text

"""Tables for LaTeX: a `tabular` with the rules of the package booktabs, and texts that are safe.

The tables of runs and of regressions are both made here, so that they look alike in a paper. A
table is a `tabular` alone: caption, label and place belong to the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

SIGNS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "×": r"$\times$",
    "α": r"$\alpha$",
    "η": r"$\eta$",
    "μ": r"$\mu$",
}
"""What LaTeX takes for a command, or does not print in every font."""


def escaped(text: str) -> str:
    """Text whose special characters mean nothing to LaTeX.

    >>> escaped("blood_sugar > 50 %")
    'blood\\\\_sugar > 50 \\\\%'
    """
    return "".join(SIGNS.get(sign, sign) for sign in text)


def bold(text: str) -> str:
    """Text, already escaped, in bold letters."""
    return rf"\textbf{{{text}}}"


def tabular(
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    notes: Sequence[str] = (),
    above: Sequence[str] = (),
) -> str:
    """A table: the first column is set to the left, the others to the right.

    Args:
        heads: The heads of the columns, already escaped.
        lines: The cells of each line, already escaped.
        notes: Texts that stand above the table as comments.
        above: Lines of LaTeX between the upper rule and the heads, as they are.
    """
    comments = [r"% needs \usepackage{booktabs}"]
    comments += [f"% {' '.join(note.split())}" for note in notes]
    rows = [_line(cells) for cells in lines]
    parts = [
        *comments,
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        *above,
        _line(heads),
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    """One line of a table."""
    return " & ".join(cells) + r" \\"

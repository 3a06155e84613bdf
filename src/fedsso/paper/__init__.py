"""The paper's tables, figures and theory from our own runs: what `fedsso paper` calls.

`COMMANDS` lists them by name. Each command takes a `Lab`, which says where results go and how
thoroughly to run, and writes its files there. A command's module is imported when the command runs:
most users need none of them.

How the modules fit together:

    tasks       what is trained, and with which grids
    published   the numbers that the paper prints, and the curves that its authors released
    lab         runs what is needed, and keeps every run
    table2, table3, curves, theory
                one module for each kind of result
    released    our runs beside the released curves
    write       how pages, numbers and pictures are written
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .figures import FIGURES

if TYPE_CHECKING:
    from .lab import Lab

Command = Callable[["Lab"], None]
"""A function that runs an experiment and writes its files into the lab's folder."""


class Entry(NamedTuple):
    """A table, a figure or the theory: its title, and the command that makes it."""

    title: str
    """What the result shows, for the list of commands and for the links on the page of `all`."""
    command: Command
    """What makes it."""


def _table2(lab: Lab) -> None:
    """Table 2, all blocks.

    The command line can choose some of them, or add the slow methods. Then it calls
    `table2.table2` itself.
    """
    from .table2 import table2

    table2(lab)


def _table3(lab: Lab) -> None:
    """Table 3, which needs the folder alone.

    Nothing is trained, so a quick look is the same as the whole table.
    """
    from .table3 import table3

    table3(lab.out)


def _figure(lab: Lab, name: str) -> None:
    """A figure that is described by data alone: `name` is its key in `figures.FIGURES`."""
    from .curves import figure

    figure(lab, name)


def _newton(lab: Lab) -> None:
    """The figure of FedNL on a small network for text."""
    from .curves import newton

    newton(lab, "fig-fednl")


def _local_updates(lab: Lab) -> None:
    """The figure on the number of local steps."""
    from .curves import local_updates

    local_updates(lab, "fig-tau")


def _theory(lab: Lab) -> None:
    """The theory's claims, tested on small problems."""
    from .theory import theory

    theory(lab.out, quick=lab.quick, note=lab.note)


def _all(lab: Lab) -> None:
    """Make everything, one after the other, and a page all.md with links to it.

    The commands share the folder of runs. So a figure that needs the runs of Table 2 reads them.
    """
    from .write import save_text

    links = []
    for name, entry in COMMANDS.items():
        if name == "all":
            continue
        lab.note(f"--- {name}: {entry.title}")
        entry.command(lab)
        links.append(f"- [{name}]({name}.md): {entry.title}")
    save_text(lab.out / "all.md", "# The paper, from our own runs", "\n".join(links))


def _figure_entries() -> dict[str, Entry]:
    """The figures that are described by data alone, by name.

    `partial` fixes the name now. A lambda in the loop would see the last name only.
    """
    entries = {}
    for name, figure in FIGURES.items():
        entries[name] = Entry(figure.title, partial(_figure, name=name))
    return entries


COMMANDS: dict[str, Entry] = {
    "table2": Entry(
        "rounds and bytes to accuracies, every algorithm at its best setting",
        _table2,
    ),
    "table3": Entry(
        "communication and memory, measured beside the paper's formulas",
        _table3,
    ),
    **_figure_entries(),
    "fig-fednl": Entry("FedNL on text, where its matrices fit", _newton),
    "fig-tau": Entry("the number of local steps", _local_updates),
    "theory": Entry("rates, lemmas, lighthouse point and bias, by experiment", _theory),
    "all": Entry("everything, one after the other", _all),
}
"""What `fedsso paper NAME` can make, in the order in which `all` makes it."""

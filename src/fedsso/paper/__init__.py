"""The paper's tables, figures and theory from our own runs: what `fedsso paper` calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from . import table2, table3, theory
from .curves import FIGURES, figure, local_updates, newton
from .lab import Lab
from .write import save_text

Command = Callable[[Lab], None]


class Entry(NamedTuple):
    """A table or figure."""

    title: str
    command: Command


def _each(lab: Lab) -> None:
    """Everything, one after the other, and a page that links it."""
    for name, entry in COMMANDS.items():
        if name != "all":
            lab.note(f"--- {name}: {entry.title}")
            entry.command(lab)
    links = [
        f"- [{name}]({name}.md): {entry.title}" for name, entry in COMMANDS.items() if name != "all"
    ]
    save_text(lab.out / "all.md", "# The paper, from our own runs", "\n".join(links))


COMMANDS: dict[str, Entry] = {
    "table2": Entry(
        "rounds and bytes to accuracies, every algorithm at its best setting", table2.table2
    ),
    "table3": Entry(
        "communication and memory, measured beside the paper's formulas",
        lambda lab: table3.table3(lab.out),
    ),
    **{name: Entry(f.title, partial(figure, name=name)) for name, f in FIGURES.items()},
    "fig-fednl": Entry(
        "FedNL on text, where its matrices fit", lambda lab: newton(lab, "fig-fednl")
    ),
    "fig-tau": Entry("the number of local steps", lambda lab: local_updates(lab, "fig-tau")),
    "theory": Entry(
        "rates, lemmas, lighthouse point and bias, by experiment",
        lambda lab: theory.theory(lab.out, quick=lab.quick, note=lab.note),
    ),
    "all": Entry("everything, one after the other", _each),
}

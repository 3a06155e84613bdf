"""The paper's theory, checked by experiment: one section for each claim, with its numbers.

`theory` tests all claims and writes theory.md (the text), theory.csv (every number) and the figure.
Each claim is tested by one function of `rates`, `matrix` or `points`. These run FedSSO by the
functions of `watch`, which look at the server's state after every round. The sentences of a verdict
are put together from what was measured, so another version of the algorithm changes the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import InputError, integer
from ...report import tables as report
from ...support import picture
from ...support.files import check_writable, write_atomic
from .claims import PERIOD, Effort, Fact, Section
from .drawing import draw
from .matrix import lemma_2_3
from .points import bias, lighthouse
from .rates import theorem_2_1, theorem_3_1

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

CLAIMS: dict[str, Callable[[Effort], Section]] = {
    "Theorem 2.1": theorem_2_1,
    "Theorem 3.1": theorem_3_1,
    "Lemma 2.3": lemma_2_3,
    "Theorem 1.1": lighthouse,
    "the limit of FedSSO": bias,
}
"""The claims by name, in the order of the page, each with the function that tests it."""
ROUNDS = 1000
"""The rounds of the longest runs."""
QUICK_ROUNDS = 250
"""The same in a quick look. It is more than the paper's period R, so there is still a reset."""
QUICK_SEEDS = 2
"""How many of the seeds a quick look has."""
# The top of the page.
INTRODUCTION = (
    "# The theory, checked by experiment\n"
    "\n"
    "Every number below was measured on runs of this package in float64, with the paper's "
    'Algorithm 1 (`guard="none"`),\n'
    f"without its reset of B (`R=None`) except where R = {PERIOD}, the paper's, is named.\n"
    "theory.csv holds them all, theory.png and theory.pdf show the most telling ones.\n"
)


def theory(
    out: Path,
    *,
    quick: bool = False,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Test the paper's claims and write theory.md, .csv, .png and .pdf into the folder `out`.

    All runs are on the CPU: the problems are small, and a GPU would be slower.

    Args:
        out: The folder. Earlier files of these names are replaced.
        quick: Have fewer rounds, and the first two seeds alone.
        seeds: The seeds of the mini-batches. For the limit of FedSSO, each draws another problem.
        note: Is told which claim is tested next.

    Raises:
        InputError: There is no seed, or one is given twice, or the folder cannot be written.
    """
    chosen = tuple(integer("seed", seed) for seed in seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"seeds must be different and at least one, got {chosen}")
    check_writable(out)
    effort = Effort(ROUNDS, chosen)
    if quick:
        effort = Effort(QUICK_ROUNDS, chosen[:QUICK_SEEDS])
    write(out, effort, note)


def write(out: Path, effort: Effort, note: Callable[[str], None]) -> None:
    """The same for any number of rounds and seeds, without checks.

    All numbers are collected first; files are written when every claim has been tested.
    """
    sections = []
    facts: list[Fact] = []
    for number, (name, claim) in enumerate(CLAIMS.items(), 1):
        note(f"theory {number}/{len(CLAIMS)}: {name}")
        section = claim(effort)
        sections.append(section)
        facts += section.facts
    write_atomic(out / "theory.md", "\n".join([INTRODUCTION, *map(_markdown, sections)]))
    write_atomic(out / "theory.csv", _csv(facts))
    for suffix in ("png", "pdf"):
        picture.draw(out / f"theory.{suffix}", lambda figure: draw(figure, facts))


def _markdown(section: Section) -> str:
    """A section as Markdown.

    It has the claim, what was done, the table of quantities, and the verdict.
    """
    rows = [{"quantity": quantity, "measured": value} for quantity, value in section.rows]
    return (
        f"## {section.title}\n\n"
        f"**The paper.** {section.says}\n\n"
        f"**Done.** {section.did}\n\n"
        f"{report.markdown(rows)}\n"
        f"**Verdict.** {section.verdict}\n"
    )


def _csv(facts: Sequence[Fact]) -> str:
    """The facts as CSV, with the names of the columns in the first line.

    Claims and quantities are quoted, because they may hold commas. A missing seed or round is an
    empty cell.
    """
    lines = [",".join(Fact._fields)]
    for fact in facts:
        seed = "" if fact.seed is None else str(fact.seed)
        k = "" if fact.k is None else str(fact.k)
        lines.append(f'"{fact.claim}","{fact.quantity}",{seed},{k},{fact.value}')
    return "\n".join(lines) + "\n"

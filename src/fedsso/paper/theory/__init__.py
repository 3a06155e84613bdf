"""The paper's theory, checked by experiment: one section for each claim, with the numbers behind
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import InputError, integer
from ...report import tables as report
from ...support import picture
from ...support.files import check_writable, write_atomic
from .drawing import draw
from .matrix import lemma_2_3
from .points import bias, lighthouse
from .rates import PERIOD, theorem_2_1, theorem_3_1
from .watch import Effort, Fact, Section

CLAIMS: dict[str, Callable[[Effort], Section]] = {
    "Theorem 2.1": theorem_2_1,
    "Theorem 3.1": theorem_3_1,
    "Lemma 2.3": lemma_2_3,
    "Theorem 1.1": lighthouse,
    "the limit of FedSSO": bias,
}
ROUNDS, QUICK_ROUNDS, QUICK_SEEDS = 1000, 250, 2
INTRODUCTION = f"""# The theory, checked by experiment

Every number below was measured on runs of this package in float64, with the paper's Algorithm 1 (`guard="none"`),
without its reset of B (`R=None`) except where R = {PERIOD}, the paper's, is named.
theory.csv holds them all, theory.png and theory.pdf show the most telling ones.
"""


def theory(
    out: Path,
    *,
    quick: bool = False,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Test the paper's claims and write theory.md, theory.csv, theory.png and theory.pdf into a
    folder.

    It runs on the CPU: the problems are small, a GPU would be slower.
    """
    chosen = tuple(integer("seed", seed) for seed in seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"seeds must be different and at least one, got {chosen}")
    check_writable(out)
    write(
        out, Effort(QUICK_ROUNDS, chosen[:QUICK_SEEDS]) if quick else Effort(ROUNDS, chosen), note
    )


def write(out: Path, effort: Effort, note: Callable[[str], None]) -> None:
    """The same with any number of rounds."""
    sections = []
    for number, (name, claim) in enumerate(CLAIMS.items(), 1):
        note(f"theory {number}/{len(CLAIMS)}: {name}")
        sections.append(claim(effort))
    facts = [fact for section in sections for fact in section.facts]
    write_atomic(out / "theory.md", "\n".join([INTRODUCTION, *map(_markdown, sections)]))
    write_atomic(out / "theory.csv", _csv(facts))
    for suffix in ("png", "pdf"):
        picture.draw(out / f"theory.{suffix}", lambda figure: draw(figure, facts))


def _markdown(section: Section) -> str:
    table = report.markdown(
        [{"quantity": quantity, "measured": value} for quantity, value in section.rows]
    )
    return (
        f"## {section.title}\n\n**The paper.** {section.says}\n\n**Done.** "
        f"{section.did}\n\n{table}\n"
        f"**Verdict.** {section.verdict}\n"
    )


def _csv(facts: Sequence[Fact]) -> str:
    lines = [tuple("" if value is None else str(value) for value in fact) for fact in facts]
    rows = [
        Fact._fields,
        *((f'"{claim}"', f'"{quantity}"', *rest) for claim, quantity, *rest in lines),
    ]
    return "".join(",".join(row) + "\n" for row in rows)

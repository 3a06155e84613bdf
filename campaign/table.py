"""The campaign's result as counts, as a table, and as a few worst examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .verdict import BAD, GOOD, Result

HEADS = {"memory": "over 2 GB", "traceback": "tracebacks", "hang": "hangs"}
EXAMPLES = 40  # of failures that are listed


def counts(results: Iterable[Result]) -> dict[str, int]:
    """How often each verdict was given; those that never were are left out."""
    given = Counter(result.verdict for result in results)
    found = {"tried": given.total(), **{key: given[key] for key in (*GOOD, *BAD)}}
    return {key: count for key, count in found.items() if count}


def document(results: Sequence[Result], about: Mapping[str, Any]) -> dict[str, Any]:
    """All counts, by part and by what was tried, and the failures in full."""
    parts: dict[str, Any] = {}
    for part in dict.fromkeys(result.part for result in results):
        own = [result for result in results if result.part == part]
        groups = {
            group: [r for r in own if r.group == group]
            for group in dict.fromkeys(r.group for r in own)
        }
        parts[part] = {
            "seconds": round(sum(result.seconds for result in own)),
            "counts": counts(own),
            "groups": {group: counts(some) for group, some in groups.items()},
        }
    return {
        **about,
        "parts": parts,
        "failures": [asdict(result) for result in results if result.bad],
    }


def table(rows: Mapping[str, Mapping[str, int]], first: str = "part") -> str:
    """Counts as Markdown; what never happened, nor would be a failure, is left out."""
    used = [
        key
        for key in ("tried", *GOOD, *BAD)
        if key == "tried" or key in BAD or any(key in r for r in rows.values())
    ]
    heads = [first, *(HEADS.get(key, key) for key in used)]
    lines = [heads, ["---", *["---:"] * len(used)]]
    lines += [[name, *(str(row.get(key, 0)) for key in used)] for name, row in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def of_parts(found: Mapping[str, Any]) -> str:
    """One row for each part."""
    return table({name: part["counts"] for name, part in found["parts"].items()})


def of_groups(found: Mapping[str, Any], part: str) -> str:
    """One row for each thing that a part was tried on."""
    return table(found["parts"][part]["groups"], first="tried on") if part in found["parts"] else ""


def examples(found: Mapping[str, Any]) -> str:
    """The failures, a few lines each, with the command that repeats one."""
    failures = found["failures"]
    lines = []
    for one in failures[:EXAMPLES]:
        which = f"--only {one['part']} --case {one['number']} --seed {found['seed']}"
        again = f"python -m campaign {which}{' --quick' * found['quick']}"
        seen = "\n    ".join(one["seen"].strip().splitlines()[-3:])
        lines.append(f"{one['verdict']}: {one['group']}: {one['name']}\n  {again}\n    {seen}")
    if len(failures) > EXAMPLES:
        lines.append(f"and {len(failures) - EXAMPLES} more")
    return "\n".join(lines)

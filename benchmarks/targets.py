"""The targets, and a plain-text table that says which are reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Check(NamedTuple):
    """One ratio (or amount) against its bound."""

    what: str
    value: float
    sign: str  # ">=" or "<="
    bound: float

    @property
    def reached(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.bound if self.sign == ">=" else self.value <= self.bound

    def __str__(self) -> str:
        verdict = "reached" if self.reached else "MISSED"
        return f"{self.what:<44}{self.value:>9.2f}   {self.sign} {self.bound:<6g} {verdict}"


def checks(found: dict[str, Any]) -> Iterator[Check]:
    """The targets of every part that ran."""
    if "J1" in found:
        ours, loop, stacked, fedsso, peak = (
            found["J1"][key] for key in _keys("ours loop stacked fedsso", "peak_mb")
        )
        yield Check("J1 loop / ours", loop / ours, ">=", 4)
        yield Check("J1 ours / hand-stacked", ours / stacked, "<=", 1.3)
        yield Check("J1 FedSSO with a full store / FedAvg", fedsso / ours, "<=", 1.5)
        yield Check("J1 peak memory, MB", peak, "<=", 700)
    if "J2" in found:
        yield Check(
            "J2 loop / ours", found["J2"]["loop_cpu_ms"] / found["J2"]["ours_cpu_ms"], ">=", 5
        )
    if "J3" in found:
        yield Check(
            "J3 ours / loop", found["J3"]["ours_cpu_ms"] / found["J3"]["loop_cpu_ms"], "<=", 1.05
        )
    for unit in ("wall_ms", "cpu_ms") if "J3_cores" in found else ():
        spent = found["J3_cores"]
        ratio = spent[f"ours_{unit}"] / spent[f"loop_{unit}"]
        yield Check(f"J3 ours / loop, two threads, {unit}", ratio, "<=", 0.6)
    for step in found.get("server_step", []):
        if step["d"] >= 1e6 and "batched_wall_ms" not in found.get(
            "sweep", {}
        ):  # on a GPU launches decide, not bytes
            yield Check(
                f"server step / one pass, d = {step['d']:.0e}",
                step["ms"] / step["floor_ms"],
                "<=",
                8,
            )
    if "sweep" in found:
        batched, one_by_one = found["sweep"].values()
        on_gpu = "batched_wall_ms" in found["sweep"]
        yield Check(
            "sweep, one by one / batched", one_by_one / batched, ">=", 20 if on_gpu else 1.5
        )


def _keys(contestants: str, *others: str) -> list[str]:
    return [f"{name}_cpu_ms" for name in contestants.split()] + list(others)


def report(found: dict[str, Any]) -> str:
    """The numbers, then the targets."""
    lines = [
        f"{name:<13}{_numbers(part)}" for name, part in found.items() if isinstance(part, dict)
    ]
    lines += [f"{'server_step':<13}{_numbers(step)}" for step in found.get("server_step", [])]
    return "\n".join([*lines, "", *map(str, checks(found))])


def _numbers(part: dict[str, float]) -> str:
    return "   ".join(f"{name} {value:.4g}" for name, value in part.items())

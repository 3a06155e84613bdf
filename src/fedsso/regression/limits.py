"""What a hospital refuses to answer, by limits that it sets for itself.

The defaults are in the spirit of DataSHIELD's: few rows, few events, or nearly as many coefficients
as rows would let the numbers of an answer tell about single patients.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Limits:
    """A hospital's own limits; its configuration may change them."""

    min_rows: int = 10
    """Fewer rows than this, in all or that two answers differ by: no answer."""
    min_events: int = 3
    """Fewer rows with an event or a count, or, of two outcomes, without one: no answer."""
    min_level: int = 3
    """Fewer rows, but not none, on one side of a column with two values, with a level, a reference
    level or a gap: no answer."""
    min_cell: int = 3
    """Groups of fewer rows are left out of calibration curves."""
    max_share: float = 0.33
    """More coefficients than this share of the rows, likewise: no answer."""


OWN = Limits(min_level=1)
"""Of a person who holds all tables and may see every row: too few rows or events are told still."""
UNLIMITED = Limits(min_rows=1, min_events=0, min_level=1, min_cell=1, max_share=inf)

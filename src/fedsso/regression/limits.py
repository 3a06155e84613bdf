"""What a hospital refuses to answer, by limits that it sets for itself.

The defaults are in the spirit of DataSHIELD's: few rows, few events, or nearly as many coefficients
as rows would let the numbers of an answer tell about single patients.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """A hospital's own limits; its configuration may change them."""

    min_rows: int = 10
    """Fewer rows than this: no answer."""
    min_events: int = 3
    """Of a yes/no outcome or survival: fewer events, or fewer rows without one: no answer."""
    min_level: int = 1
    """Fewer rows, but not none, with a level or a gap that has a coefficient: no answer."""
    min_cell: int = 3
    """Groups of fewer rows are left out of calibration curves."""
    max_share: float = 0.33
    """No answer if there are more coefficients than this share of the rows."""

"""Files in the form of the four hospitals', of made-up patients."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TYPICAL = (54, 0.7, 3, 132, 247, 0.15, 1, 150, 0.3, 1, 1.6, 0.7, 4.7)
SPREAD = (9, 0.5, 1, 18, 52, 0.35, 1, 23, 0.5, 1.2, 0.6, 0.9, 1.9)
SIZES = {"cleveland": 90, "hungarian": 70, "switzerland": 40, "va": 60}


def write(folder: Path) -> Path:
    """processed.NAME.data of each hospital: rows with gaps, and a diagnosis that some of the
    features decide."""
    draw = np.random.default_rng(5)
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in SIZES.items():
        z = draw.normal(size=(n, 13)) + 0.3 * draw.normal(size=13)
        sick = (z[:, 2] + z[:, 9] + z[:, 11] + draw.normal(size=n) > 0).astype(int)
        cells = [
            [f"{value:.1f}" for value in row] for row in np.array(TYPICAL) + z * np.array(SPREAD)
        ]
        for i, row in enumerate(cells):
            row[i % 13] = "?"
        lines = (",".join([*row, str(num)]) for row, num in zip(cells, sick, strict=True))
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder

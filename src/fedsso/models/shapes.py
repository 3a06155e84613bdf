"""What a model asks of the shape of a sample."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError


def image(
    sample: Sequence[int],
    name: str,
    least: int = 4,
) -> tuple[int, int, int]:
    """Channels, height and width of a sample; an error if it is no image, or too small."""
    if len(sample) != 3 or min(sample[1:]) < least:
        shape = f"[channels, height >= {least}, width >= {least}]"
        raise InputError(f"model {name!r} needs images {shape}, got {tuple(sample)}")
    return sample[0], sample[1], sample[2]


def text(
    sample: Sequence[int],
    name: str,
) -> tuple[int, int]:
    """Window and alphabet of a sample of one-hot characters; an error if it is none."""
    if len(sample) != 2:
        raise InputError(
            f"model {name!r} needs one-hot characters [window, alphabet], such as those of "
            f"'shakespeare', got samples {tuple(sample)}"
        )
    return sample[0], sample[1]

"""Readers of image sets: uint8 samples [1, H, W] and the affine map that takes them to a pixel range."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError


class Pool(NamedTuple):
    """A data set before it is shared out."""

    x: Tensor
    y: Tensor
    affine: tuple[float, float]


def digits(*, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """The 1797 8×8 digits that come with scikit-learn; pixels are 0..16."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError("data set 'digits' comes with scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images.astype(np.uint8)).view(-1, 1, 8, 8)
    return Pool(x, torch.from_numpy(labels.astype(np.int64)), _affine(pixel_range, 16))


def npz(path: Path, *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """28×28 images from a .npz file with x (uint8 [rows, 28, 28]) and y (integers [rows])."""
    x, y = _arrays(path)
    if x.dtype != np.uint8 or x.ndim != 3 or x.shape[1:] != (28, 28):
        raise InputError(f"{path}: x must be uint8 [rows, 28, 28], got {x.dtype} {list(x.shape)}")
    if y.dtype.kind not in "iu" or y.shape != (len(x),):
        raise InputError(f"{path}: y must be integers [{len(x)}], one per image, got {y.dtype} {list(y.shape)}")
    return Pool(torch.from_numpy(x)[:, None], torch.from_numpy(y.astype(np.int64)), _affine(pixel_range, 255))


def _arrays(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return file["x"], file["y"]
    except KeyError as error:
        raise InputError(f"{path}: {error.args[0]}; need x and y") from None
    except (
        OSError,
        ValueError,
        EOFError,
        TypeError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise InputError(f"{path}: cannot be read as .npz, corrupt or cut short ({error}): fetch it again") from None


def _affine(pixel_range: Sequence[float], brightest: int) -> tuple[float, float]:
    low, high = pixel_range
    if not (math.isfinite(high - low) and low < high):
        raise InputError(f"pixel_range must be two finite numbers, low < high, got {list(pixel_range)}")
    return (high - low) / brightest, low

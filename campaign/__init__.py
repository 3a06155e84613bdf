"""The campaign against the library: kills, damaged files, faults, hostile replies, odd numbers.

Each case runs in a process of its own that is forked from this one, so that torch is imported once.
A process that has several threads must not be forked: the libraries below are told to use one
before they are loaded.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("MPLBACKEND", "agg")

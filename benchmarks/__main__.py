"""`python -m benchmarks`."""

from __future__ import annotations

from .bench import main

main()

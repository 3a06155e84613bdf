"""`python -m fedsso` is the command `fedsso`."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()

"""`python -m fedsso` is the command `fedsso`: from its first moment on a signal ends it without a
traceback."""

from __future__ import annotations

import warnings

from .support.stopping import at_once, listen


def main() -> None:
    """The entry point of the command."""
    listen(at_once)  # loading torch takes seconds, in which there is nothing to save
    with warnings.catch_warnings():  # typer imports names that click 9 will no longer have
        warnings.simplefilter("ignore", DeprecationWarning)
        from .cli.main import main as command

    command()


if __name__ == "__main__":
    main()

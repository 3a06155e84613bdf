"""Flower is loaded once, with what its dependencies deprecate; warnings of the tests themselves
stay errors."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import flwr.client
    import flwr.server
    import flwr.serverapp.strategy  # noqa: F401

"""Shows the messages of the core in Flower's log.

The modules of this room log to Flower's own logger, "flwr". The core does not know Flower and logs
to "fedsso": that the server went back to an earlier model, that a checkpoint is damaged, that pairs
do not fit into the memory. Python would write these to standard error without their level, between
Flower's lines, and they would be missing in Flower's log file.
"""

from __future__ import annotations

import logging

FLOWER = logging.getLogger("flwr")
CORE = logging.getLogger("fedsso")


class ToFlower(logging.Handler):
    """Gives each record to the handlers of Flower's logger.

    They are looked up for each record, because Flower adds some of them late. The record is not
    logged again under "flwr": both loggers pass their records on to the root logger, whose handlers
    would then show it twice.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Let those of Flower's handlers show a record whose level admits it."""
        for handler in FLOWER.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def join() -> None:
    """Show what the core logs in Flower's log from now on. A second call changes nothing.

    It leaves the level of "fedsso" alone: unless somebody has set it, warnings and errors are
    shown.
    """
    if not any(isinstance(handler, ToFlower) for handler in CORE.handlers):
        CORE.addHandler(ToFlower())

"""Where to download the official files of the data sets.

The addresses are in remotes.json: for each data set a list of files, and for each file its name in
the data folder, the addresses to try in turn, its SHA-256 and its size in bytes. A file that is an
archive also has `members`: the names of the files in it, and their places in the data folder.

The SHA-256 sums and sizes of MNIST, Fashion-MNIST, EMNIST, CIFAR-10, Shakespeare and Sentiment140
are those that TensorFlow Datasets records. Those of the heart files belong to the files whose MD5
sums FLamby records. No public record was found for the LIBSVM files. There the reader of the data
set decides whether a download is the right one.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from .fetch import Remote


def _remote(entry: dict[str, Any]) -> Remote:
    """One file of remotes.json."""
    members = entry.get("members", {})
    return Remote(
        entry["file"],
        tuple(entry["urls"]),
        entry.get("sha256", ""),
        entry.get("size", 0),
        tuple(members.items()),
    )


def _all_remotes() -> dict[str, tuple[Remote, ...]]:
    """The files of every data set, by the name of the set."""
    text = files(__package__).joinpath("remotes.json").read_text()
    found = {}
    for name, entries in json.loads(text).items():
        found[name] = tuple(map(_remote, entries))
    # One archive holds all of EMNIST. Whichever of the three sets is asked for, all arrive.
    emnist = found.pop("emnist")
    for part in ("digits", "letters", "balanced"):
        found[f"emnist_{part}"] = emnist
    return found


REMOTES = _all_remotes()
"""The official files of each data set that has any."""

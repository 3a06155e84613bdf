"""The whole page: the template `assets/page.html` with all its parts filled in.

The page of a regression is made of the same template, with a body of its own.

Scripts and styles stand in the page itself. Its content policy allows these scripts only, by
their hashes, and no access to the network. So a script that slipped in through a name would not
run, and the page is the same without a network.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...support.files import write_atomic
from ...support.intake import read_bytes, read_text
from . import sections
from .clients import clients
from .script import data
from .view import View

if TYPE_CHECKING:
    from .content import Content

ASSETS = Path(__file__).parents[1] / "assets"
MARK = '<meta name="generator" content="fedsso">'
"""In assets/page.html: it tells our pages from those of others."""

# Nothing may be loaded, but for pictures that the page makes itself: Plotly saves charts as such.
# Styles may stand in the page: its own do, and Plotly adds some.
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write(path: str | Path, content: Content) -> None:
    """Write the page to a file; a file that lies there is replaced.

    The file is written whole or not at all. Whether a file may be replaced is for the caller to
    decide: `MARK` tells a page of ours.
    """
    write_atomic(path, page(content))


def page(content: Content) -> str:
    """The whole page as text, which is HTML in UTF-8.

    The same content gives the same page, byte by byte: there is no date in it.

    Raises:
        InputError: There is no entry, or a curve has no traces.
    """
    if not content.entries:
        raise InputError("there is no run to report; give at least one")
    view = View(content)
    plotly = gzip.decompress(read_bytes(ASSETS / "plotly-cartesian.min.js.gz")).decode()
    script = read_text(ASSETS / "report.js")
    hashes = f"{_hash(plotly)} {_hash(script)}"
    head = {
        "policy": POLICY.format(scripts=hashes),
        "title": view.title,
        "about": sections.about(view),
    }
    parts = {
        "style": read_text(ASSETS / "report.css"),
        "notes": sections.paragraphs(content.text) + sections.notes(content.notes),
        "cards": "\n".join(sections.cards(view)),
        "scripts": _scripts(_json(data(view)), plotly, script),
    }
    body = {
        "tables": sections.tables(view),
        "clients": clients(view),
        "recipes": sections.recipes(content.recipes),
    }
    return document(head, parts, filled("report.html", body))


def document(
    head: Mapping[str, str],
    parts: Mapping[str, str],
    body: str,
) -> str:
    """A page of ours: the template with its head, parts and body.

    Args:
        head: Policy, title and what the page is about, as plain text.
        parts: Style, notes, cards and scripts, as HTML.
        body: The sections of the page, as HTML.
    """
    plain = {name: escape(text) for name, text in head.items()}
    text = filled("page.html", {**plain, **parts, "body": body})
    return text.encode(errors="replace").decode()  # a name may hold what is no text


def filled(name: str, parts: Mapping[str, str]) -> str:
    """A template of `assets` with its parts."""
    return Template(read_text(ASSETS / name)).substitute(parts)


def _scripts(numbers: str, *scripts: str) -> str:
    """The numbers of the page and the scripts that draw them, as HTML."""
    lines = [f'<script type="application/json" id="data">{numbers}</script>']
    lines += [f"<script>{script}</script>" for script in scripts]
    return "\n".join(lines)


def _hash(script: str) -> str:
    """A script's hash in the form that a content policy has, as in 'sha256-...' in base64."""
    digest = sha256(script.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


def _json(value: Any) -> str:
    """JSON that cannot end the script element in which it stands; NaN does not occur in it.

    A browser looks for "</script" in the raw text, before anything reads it as JSON. So brackets
    and ampersands are written by their numbers, which JSON understands and HTML does not.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text

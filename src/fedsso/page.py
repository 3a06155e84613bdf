"""A run's results as one self-contained HTML page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from .errors import unknown
from .files import read_bytes, to_toml

Tables = Mapping[str, Sequence[Mapping[str, str]]]
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark;
  --ink: #1c2128; --soft: #59636e; --line: #d8dde3; --tint: #f4f6f8; --paper: #fff }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e4e8ec; --soft: #9aa5b1; --line: #39424d; --tint: #1d232b; --paper: #13171c }}
}}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; max-width: 66rem; padding: 2rem 1rem 4rem;
  font: 1rem/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper) }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem }}
h1, p, pre, td, tbody th {{ overflow-wrap: break-word }}
h2 {{ font-size: 1.1rem; margin: 2.2rem 0 .6rem }}
p {{ max-width: 44rem }}
.picture {{ margin: 1.5rem 0; overflow-x: auto; border: 1px solid var(--line); border-radius: 8px;
  background: #fff }}
.picture img {{ display: block; width: 100%; min-width: 40rem; height: auto; padding: .6rem }}
.results {{ overflow-x: auto }}
@media (min-width: 44rem) {{ td span, tbody th {{ white-space: nowrap }} }}
table {{ border-collapse: collapse; width: 100%; font-size: .95rem; font-variant-numeric: tabular-nums }}
th, td {{ padding: .45rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top }}
thead th {{ color: var(--soft); font-size: .85rem; font-weight: 600; vertical-align: bottom }}
th:first-child {{ text-align: left }}
tbody tr:hover {{ background: var(--tint) }}
pre {{ background: var(--tint); border-radius: 8px; padding: 1rem; font-size: .85rem; white-space: pre-wrap }}
@media (max-width: 44rem) {{
  table, tbody, tr, th, td {{ display: block }}
  thead {{ position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden }}
  tbody tr {{ padding: .7rem 0; border-bottom: 1px solid var(--line) }}
  tbody th, td {{ border: 0; padding: .1rem 0 }}
  td {{ display: flex; justify-content: space-between; gap: 1rem }}
  td::before {{ content: attr(data-name); color: var(--soft); text-align: left }}
}}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
{text}
<div class="picture" tabindex="0" role="group" aria-label="Curves"><img alt="{alt}" src="{image}"></div>
{tables}
<h2>Settings</h2>
<pre>{settings}</pre>
</main>
</body>
</html>
"""
MIME = {".png": "image/png", ".svg": "image/svg+xml"}


def page(title: str, tables: Tables, image: Path, settings: Mapping[str, object], text: str = "") -> str:
    """One HTML page that needs no other file: tables under their headings; blank lines in `text` part paragraphs."""
    first = next(iter(tables.values()), [])
    labels = ", ".join(next(iter(row.values())) for row in first)
    return PAGE.format(
        title=escape(title),
        text="\n".join(f"<p>{escape(part.strip())}</p>" for part in text.split("\n\n") if part.strip()),
        alt=escape(f"Test accuracy and training loss over communication rounds of {labels}"),
        image=_data_uri(image),
        tables="\n".join(_section(name, rows) for name, rows in tables.items()),
        settings=escape(to_toml(settings)),
    )


def _data_uri(image: Path) -> str:
    suffix = image.suffix.lower()
    if suffix not in MIME:
        raise unknown("picture format of a page", suffix, MIME)
    return f"data:{MIME[suffix]};base64,{b64encode(read_bytes(image)).decode()}"


def _section(name: str, rows: Sequence[Mapping[str, str]]) -> str:
    return f'<h2>{escape(name)}</h2>\n<div class="results">\n{_table(rows)}\n</div>'


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """With roles, because the narrow layout takes the table's own away."""
    names = list(rows[0]) if rows else []
    head = "".join(f'<th role="columnheader" scope="col">{escape(name)}</th>' for name in names)
    body = "\n".join(f'<tr role="row">{_cells(row)}</tr>' for row in rows)
    head = f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>'
    return f'<table role="table">\n{head}\n<tbody role="rowgroup">\n{body}\n</tbody>\n</table>'


def _cells(row: Mapping[str, str]) -> str:
    (_, label), *values = row.items()
    cells = "".join(
        f'<td role="cell" data-name="{escape(name)}"><span>{escape(value)}</span></td>' for name, value in values
    )
    return f'<th role="rowheader" scope="row">{escape(label)}</th>{cells}'

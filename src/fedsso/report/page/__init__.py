"""Runs as one HTML page that needs no other file and no network.

The page has cards with the main findings, interactive curves, tables of settings and of clients,
maps of grids, who holds which labels, diagnostics, and the settings to reproduce. It is made in
steps:

- `content`: what a page is made of
- `view`: what several parts of the page ask for, such as which setting is the best
- `sections`, `clients`: the parts that are written as HTML
- `script`: the numbers that `assets/report.js` draws with Plotly
- `document`: the whole

`Results.report` makes the content from runs in memory, `report.sources` from folders. Names and
settings on a page may come from somebody else: they can never act as HTML or as a script.
"""

from .content import Content as Content
from .content import Entry as Entry
from .content import Holding as Holding
from .content import Recipe as Recipe
from .content import Served as Served
from .content import check_targets as check_targets
from .document import ASSETS as ASSETS
from .document import MARK as MARK
from .document import page as page
from .document import write as write

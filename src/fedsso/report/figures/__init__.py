"""Figures of several panels, as the paper has them.

- `panels`: curves beside published ones, a column for each data set
- `heat_maps`: rounds to a target over a grid of settings
- `rounds_bars`: rounds to a target as bars

Each takes the path of a picture and plain records, which it checks before it draws. They know
nothing of runs or sweeps: `paper` and `report.sweeps` make the records. All need matplotlib.
"""

from .bars import Bar as Bar
from .bars import rounds_bars as rounds_bars
from .maps import Heat as Heat
from .maps import heat_maps as heat_maps
from .panels import Dots as Dots
from .panels import Panel as Panel
from .panels import panels as panels

"""What is made of runs: tables and plots here, figures of several panels, and the report page.

Begin with `Curve`, which holds the traces of one setting. `rounds_table` and `plot` take a list of
curves. `Results.table`, `Results.plot` and `Results.report` call them for you.
"""

from .plots import plot as plot
from .styles import style as style
from .tables import Curve as Curve
from .tables import default_targets as default_targets
from .tables import markdown as markdown
from .tables import numbers as numbers
from .tables import rounds_table as rounds_table
from .written import Table as Table
from .written import table as table

"""Tables, plots and the report page."""

from .tables import Curve as Curve
from .tables import default_targets as default_targets
from .tables import markdown as markdown
from .tables import numbers as numbers
from .tables import plot as plot
from .tables import rounds_table as rounds_table
from .tables import style as style

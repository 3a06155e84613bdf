"""The report of a regression: one HTML page without scripts, and the forest plot as a picture.

- `steps`: the coefficients as a forest plot shows them
- `charts`: calibration, ROC and convergence as drawings in SVG
- `page`: the page
- `forest`: the picture
"""

from .forest import plot as plot
from .page import page as page
from .page import write as write

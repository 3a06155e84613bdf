"""What comes out of a regression: tables, text, a saved model, predictions for new patients.

- `regression`: what `fedsso.glm` returns
- `printed`: its tables as text, CSV, LaTeX and HTML
- `predict`: new patients
- `model`: the folder of a saved model
"""

from .model import load_model as load_model
from .regression import Coefficient as Coefficient
from .regression import Regression as Regression

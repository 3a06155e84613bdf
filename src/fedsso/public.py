"""What `import fedsso` offers.

Names are gathered here and loaded when one of them is first asked for (`__init__.py`), because
torch takes seconds to import. They fall into six groups:

    data         load, Federation
    regressions  glm over the tables of several hospitals; Regression, what it returns; load_model
    models       build_model; any nn.Module will do as well; lora, which adapts a trained one
    algorithms   FedSSO, FedAvg and the others of `algorithms`; Algorithm, the base of one's own;
                 Decay, theorem_2 and theorem_3 for step sizes
    runs         simulate, compare, sweep and tune, with grid; Simulation, round by round; resume
    results      Run, Setting and Results; load_run and load_runs, which read folders

InputError is what wrong input raises, OutOfTime what a sweep raises whose time is up.

Authors of algorithms import what they need from `fedsso.algorithm`. Strategies and clients for
Flower are in `fedsso.flower`, which is not loaded with the rest.
"""

from . import algorithms
from .algorithm import Algorithm
from .algorithm.schedule import Decay, theorem_2, theorem_3
from .algorithms import *  # noqa: F403
from .data import Federation, load
from .errors import InputError
from .experiment.calls import compare, resume, simulate, sweep
from .experiment.grids import grid
from .experiment.problem import build_model
from .experiment.reading import load_runs
from .experiment.results import Results, Setting
from .experiment.run import Run, load_run
from .experiment.stepper import Simulation
from .experiment.tuning.call import tune
from .experiment.workers import OutOfTime
from .models.adapters import lora
from .regression.glm import glm
from .regression.result import Regression, load_model
from .version import __version__

# A name that is added here needs a docstring with an example that runs, and a line in
# docs/api.md: tests hold it to both.
__all__ = [
    *algorithms.__all__,
    "Algorithm",
    "Decay",
    "Federation",
    "InputError",
    "OutOfTime",
    "Regression",
    "Results",
    "Run",
    "Setting",
    "Simulation",
    "__version__",
    "build_model",
    "compare",
    "glm",
    "grid",
    "load",
    "load_model",
    "load_run",
    "load_runs",
    "lora",
    "resume",
    "simulate",
    "sweep",
    "theorem_2",
    "theorem_3",
    "tune",
]

"""What `import fedsso` offers."""

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
from .experiment.workers import OutOfTime
from .version import __version__

__all__ = [
    *algorithms.__all__,
    "Algorithm",
    "Decay",
    "Federation",
    "InputError",
    "OutOfTime",
    "Results",
    "Run",
    "Setting",
    "Simulation",
    "__version__",
    "build_model",
    "compare",
    "grid",
    "load",
    "load_run",
    "load_runs",
    "resume",
    "simulate",
    "sweep",
    "theorem_2",
    "theorem_3",
]

"""What `import fedsso` offers."""

from . import algorithms
from .algorithm.schedule import Decay, theorem_2, theorem_3
from .algorithms import *  # noqa: F403
from .data import Federation, load
from .errors import InputError
from .experiment.execute import compare, resume, simulate, sweep
from .experiment.problem import build_model
from .experiment.results import Run, Runs, load_run, load_runs
from .version import __version__

__all__ = [
    *algorithms.__all__,
    "Decay",
    "Federation",
    "InputError",
    "Run",
    "Runs",
    "__version__",
    "build_model",
    "compare",
    "load",
    "load_run",
    "load_runs",
    "resume",
    "simulate",
    "sweep",
    "theorem_2",
    "theorem_3",
]

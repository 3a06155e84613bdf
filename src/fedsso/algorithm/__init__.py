"""Everything that the author of an algorithm imports, from one place.

    the contract        Algorithm, Phase, Reply, Attendance, Batch, Cohort, Local, Objective,
                        as_sent, none, BLOW_UP
    records             hyper, param, build, Scalar, Step, Auto, Decay, at
    checks of fields    positive, not_negative, share, at_least
    vectors             dot, norm, gram, solve, Tree, tree_map
    work of clients     local.sgd and others

Read `contract.py` for what an algorithm is, then `algorithms/first_order/fedavg.py`, the smallest
complete example.
"""

from ..support.linalg import dot as dot
from ..support.linalg import gram as gram
from ..support.linalg import norm as norm
from ..support.linalg import solve as solve
from ..support.trees import Scalar as Scalar
from ..support.trees import Tree as Tree
from ..support.trees import tree_map as tree_map
from . import local as local
from .checks import at_least as at_least
from .checks import not_negative as not_negative
from .checks import positive as positive
from .checks import share as share
from .contract import BLOW_UP as BLOW_UP
from .contract import Algorithm as Algorithm
from .contract import Attendance as Attendance
from .contract import Batch as Batch
from .contract import Cohort as Cohort
from .contract import Local as Local
from .contract import Objective as Objective
from .contract import Phase as Phase
from .contract import Reply as Reply
from .contract import as_sent as as_sent
from .contract import none as none
from .records import build as build
from .records import filled as filled
from .records import hyper as hyper
from .records import param as param
from .schedule import Auto as Auto
from .schedule import Decay as Decay
from .schedule import Step as Step
from .schedule import at as at

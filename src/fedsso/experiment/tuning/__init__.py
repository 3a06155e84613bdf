"""Adaptive search for good hyper-parameters, in place of a grid.

space    what is searched: ranges, choices and fixed values of an algorithm's fields
batch    some settings trained stacked, of which the worse ones are dropped on the way
journal  what Optuna knows, in a file that many may add to, any of whom may be killed
search   asks Optuna for settings, trains them, tells how they fared; shared and resumable
call     `fedsso.tune`
"""

AT_ONCE = 4  # settings that are asked for and trained together, unless the user says otherwise
PRUNERS = ("halving", "median", "none")  # rules by which settings are dropped

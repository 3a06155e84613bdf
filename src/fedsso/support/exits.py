"""How a command ends: the exit codes, which are the same in every command.

Scripts can rely on them. 70 and 75 are those of sysexits.h, 130 is what a shell shows for Ctrl-C.
"""

from __future__ import annotations

# Everything was done, and nothing diverged.
FINISHED = 0
# Everything was done, but not with the result that was asked for.
DIVERGED = 1
# What an InputError ends with. argparse uses the same number for a wrong option.
WRONG_INPUT = 2
# EX_SOFTWARE of sysexits.h.
BUG = 70
# EX_TEMPFAIL of sysexits.h: try again later.
TIME_IS_UP = 75
# 128 + SIGINT, also for the other signals.
INTERRUPTED = 130

MEANING = {
    FINISHED: "finished",
    DIVERGED: (
        "finished, but a run diverged or a requested target was missed; standard error says which"
    ),
    WRONG_INPUT: (
        "invalid input, or a file, folder or device that cannot be used; standard error says what "
        "to do"
    ),
    BUG: "a bug in fedsso itself; please report the traceback",
    TIME_IS_UP: "the time limit of --minutes was reached; the same command continues",
    INTERRUPTED: (
        "stopped by Ctrl-C, SIGTERM or SIGHUP; finished work is kept in --out and can be resumed"
    ),
}
"""What each code means, in the words of the help and the documentation."""

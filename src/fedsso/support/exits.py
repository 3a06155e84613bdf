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
        "finished, but a run diverged, or a target that was asked for was missed; standard error "
        "says which"
    ),
    WRONG_INPUT: (
        "wrong input, or a file, folder or device that cannot be used; standard error says what to "
        "do"
    ),
    BUG: "a fault in fedsso itself, with the traceback to report",
    TIME_IS_UP: "the time of --minutes was up; the same command goes on",
    INTERRUPTED: (
        "stopped by Ctrl-C, SIGTERM or SIGHUP; what was done is kept in --out, and can be resumed"
    ),
}
"""What each code means, in the words of the help and the documentation."""

"""The server's part of a regression, round by round.

`talk` asks the hospitals and sums up, `scales` knows the units of the coefficients, `ascent` takes
FedSSO's steps, and `climb` decides what is asked when, and when the fit is at its end.
"""

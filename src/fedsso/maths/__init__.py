"""Quasi-Newton estimates, symmetric matrices and compression, as pure functions.

`quasi_newton.py` is what FedSSO's server does with its pairs (s, y). `symmetric.py` is for
algorithms that send Hessians. `compress.py` shortens uploads of any algorithm. None of them knows
of the engine or of clients' data.
"""

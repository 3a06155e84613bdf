"""Quasi-Newton estimates, symmetric matrices and compression, as pure functions."""

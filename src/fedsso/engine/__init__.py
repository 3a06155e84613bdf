"""Engines: they own the loop, the mean, the randomness and the devices; algorithms only compute."""

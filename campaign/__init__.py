"""The campaign against the library: kills, damaged files, faults, hostile replies, odd numbers.

Each case runs in a process of its own that is forked from this one, so that torch is imported once.
"""

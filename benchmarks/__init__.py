"""Speed of the simulator beside a plain loop and a hand-stacked reference.

Run with `python -m benchmarks`.
"""

"""Speed of the simulator against a plain loop and a hand-stacked reference: `python -m benchmarks`."""

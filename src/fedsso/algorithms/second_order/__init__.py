"""Algorithms that use second derivatives or the history of gradients; one paper, one file."""

"""Algorithms whose clients use second derivatives or the history of gradients; one paper, one file."""

"""Algorithms whose clients use gradients alone; one paper, one file."""

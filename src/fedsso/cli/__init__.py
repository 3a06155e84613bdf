"""The command `fedsso`."""

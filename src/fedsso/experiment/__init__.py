"""Settings, plans, runs and their results."""

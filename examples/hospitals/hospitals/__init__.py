"""A regression over hospitals, each with its own table, for Flower."""

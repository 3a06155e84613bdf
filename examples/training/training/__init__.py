"""Logistic regression of heart disease over four hospitals, for Flower."""

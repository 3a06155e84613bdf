"""A classifier of heart disease over four hospitals, trained on Flower."""

"""Rows that stay in files: a tensor that reads them when they are taken, and folders of them."""

"""Rows in memory, and what is counted of them."""

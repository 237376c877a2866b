"""Rows in memory, and their counts."""

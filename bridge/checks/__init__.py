"""The checks of a start: its conditions, each with a remedy."""

"""The dead-letter topics: lists of their letters, and redrive."""

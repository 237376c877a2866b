"""The dead-letter topics: what is in them, and how it goes back."""

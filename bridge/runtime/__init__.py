"""One process: how it is made, watched, and ended."""

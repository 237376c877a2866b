"""`make demo`: delayed messages through a bridge that is killed half-way, and an account of every message."""

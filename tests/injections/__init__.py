"""Requests of transactions that arrive late, twice or never, under load, by the thousand."""

"""Waits of ingest: their deadlines, their watchers, and the actions after a deadline."""

"""Waits of ingest: their deadlines, who finds that one is over, and what is done then."""

"""The HTTP API and the page: they show pending messages, dead letters and targets, and act on them.

The API has its own listener, so that its clients cannot hold up the probes and metrics of bridge/http/management.py.
"""

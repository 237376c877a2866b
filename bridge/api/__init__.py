"""The HTTP API: what is pending, where is it, and why. It reads, and changes nothing.

On a listener of its own, so that its clients cannot hold up the probes and metrics of bridge/telemetry/http.py.
"""

"""Brokers: what their errors mean, calls that wait, look-ups, group membership."""

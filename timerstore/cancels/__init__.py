"""Cancels, commands, and the cancelled timers."""

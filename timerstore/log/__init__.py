"""The TimerLog: segments, and all of them together."""

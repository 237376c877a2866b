"""The TimerLog: segments, their origin indexes, and the set of live segments."""

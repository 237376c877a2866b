"""From the timer store to the real topics: the dispatcher and what it works with."""

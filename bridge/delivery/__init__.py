"""From the timer store to the real topics: the dispatcher and its parts."""

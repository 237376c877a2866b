"""From the delay topics into the timer store: the query, and decoding in both its halves."""

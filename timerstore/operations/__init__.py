"""What is done to a store: transactions, maintenance, compaction, recovery."""

"""Transactions: the producers, which take turns, and the markers that brokers lose."""

"""Transactions: producers with turns, and the transaction markers that brokers lose."""

"""Transactions: the producer, its spare id, and the markers that brokers lose."""

"""Doubts: transactions that ended unasked, and committed states in Kafka that are not the bridge's own."""

"""Decisions of a start: facts from Kafka and the store's directory, the start plan, the place to begin."""

"""A real Kafka broker of one node, for demo, tests and bench; no part of the product."""

from dev.broker.embedded import EmbeddedBroker

__all__ = ["EmbeddedBroker"]

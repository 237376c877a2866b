"""Kafka delay bridge: delayed delivery next to a Kafka cluster."""

__version__ = "0.1.0"

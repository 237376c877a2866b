"""Kafka's transaction protocol, and the bridge's use of it, as a model that is searched completely."""

"""The formats of the bridge's data in Kafka: headers, dialects, decode epochs, committed state, dead letters. Pure."""

"""From what Kafka and the directory hold to where to begin."""

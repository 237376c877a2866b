"""What is written in Kafka: headers, dialects, decode epochs, committed state, dead letters. Pure, without Spark."""

"""The timer store: an index of pending timers. Pure Python, numpy and Arrow; knows neither Kafka nor Spark."""

"""The JVM beside the bridge: Spark's session and errors, scratch files, queries of transaction coordinators."""

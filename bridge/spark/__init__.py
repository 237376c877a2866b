"""The JVM beside the bridge: session, errors, jobs over segments, questions to the coordinator."""

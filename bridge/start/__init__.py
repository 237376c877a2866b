"""The start: facts from Kafka and the directory, the plan, and conditions that hold while the bridge runs, too."""

"""The harness around a running bridge: its process, topics and records, load and the account of it."""

"""Access to the brokers: the meaning of their errors, blocking calls, look-ups, group membership."""

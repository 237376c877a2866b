"""What is in doubt: transactions that ended without being asked to, and committed states that are not the bridge's."""

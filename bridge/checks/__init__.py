"""What must be so before the bridge may run, each with a remedy."""

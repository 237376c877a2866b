"""What is known of the real topics that records go to."""

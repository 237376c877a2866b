"""What belongs to the container image: its entry point, what it leaves out, and the list of what is in it."""

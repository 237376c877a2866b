"""What the API does: cancel, move and deliver messages, pause and resume targets."""

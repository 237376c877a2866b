"""Reading of single batches: those that have ended a reader, and those that no reader can take."""

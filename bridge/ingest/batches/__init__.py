"""Reading single batches: of what ended a reader, or what no reader can be given."""

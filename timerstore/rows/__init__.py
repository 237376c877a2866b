"""What a row is, and the total order of rows."""

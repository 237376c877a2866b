"""The columns of a row, and the total order of rows."""

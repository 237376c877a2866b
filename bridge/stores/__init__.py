"""The stores of all partitions, merged."""

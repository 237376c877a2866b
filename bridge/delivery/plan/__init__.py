"""What becomes of each due row, decided before anything is produced."""

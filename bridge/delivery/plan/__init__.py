"""Plans: the fate of each due row, decided before anything is produced."""

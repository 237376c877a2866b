"""Files: names, durability, column files, the checkpoint."""

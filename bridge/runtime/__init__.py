"""The process: its composition, supervision and end."""

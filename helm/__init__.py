"""The Helm chart, and the command that writes the parts of it that follow from others: `python -m helm`."""

"""Several instances: any of them answers for all, by asking the others."""

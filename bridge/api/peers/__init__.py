"""Several instances: any of them answers for all."""

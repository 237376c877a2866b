"""The index on shared storage (store.remote): upload, collection of garbage, adoption."""

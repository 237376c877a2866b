"""Measurements of the bridge on this machine, whose cores broker, load, bridge and consumers share. `make bench` runs
them."""

"""Measurements of the bridge on this machine: broker, load, bridge and consumers share its cores. `make bench` runs
all."""

"""Tests. Importing them begins a session, which measures once how slow the machine is (dev/harness/pace.py)."""

from __future__ import annotations

import os

from dev.harness import pace

if pace.VARIABLE not in os.environ:
    pace.announce(pace.measured())

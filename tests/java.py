"""Options of the JVMs that tests start."""

from __future__ import annotations

from typing import Final

SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1"
"""The first compiler alone. The second one takes a third of the time of a process that lives for half a minute."""

"""Rows in doubt, in a file beside the index: a process that starts anew holds their partitions further.

Each partition has its committed P of that moment, which stays while it is held. Another P says that another instance
has delivered from it since: nothing is in doubt there any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridge.delivery.doubt.findings import Part
from bridge.errors import EnvironmentFailure
from timerstore.disk import files
from timerstore.rows.sources import NamedPosition, SourceName

FILE: Final = "rows-in-doubt.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Of one partition, by offset: `rows` in doubt, with the parts that count as written if they count as delivered;
    parts of other rows that are `written`. `position` is its committed P."""

    position: NamedPosition | None
    rows: Mapping[int, Part]
    written: Mapping[int, Part]

    @property
    def offset(self) -> int:
        """The place by which an operator names the rows."""
        return min(self.rows)

    @property
    def text(self) -> str:
        """In words."""
        return f"whether {len(self.rows)} messages were delivered is not known (DB-4071)"


class DoubtFile:
    """See the module. One thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def write(self, doubts: Mapping[SourceName, Doubt]) -> None:
        """In place of all before. 1 write, 2 fsync, 3 rename: a crash leaves the old file or the new one. Raises
        TimerStoreError."""
        told = [[*name, each.position, _pairs(each.rows), _pairs(each.written)] for name, each in doubts.items()]
        if told or self._path.exists():
            with files.writing(self._path) as temporary:
                temporary.write_text(json.dumps(told) + "\n")
            files.publish(self._path)

    def read(self) -> dict[SourceName, Doubt]:
        """Raises EnvironmentFailure."""
        try:
            told = json.loads(self._path.read_bytes())
            return {
                (str(topic), int(number)): Doubt(
                    position=None if p is None else (int(p[0]), str(p[1]), int(p[2]), int(p[3])),
                    rows=_parts(rows),
                    written=_parts(written),
                )
                for topic, number, p, rows, written in told
            }
        except FileNotFoundError:
            return {}
        except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise EnvironmentFailure(
                f"cannot read {FILE} in store.directory",
                hint="Remove the file, and messages in doubt are delivered again.",
                reason=str(error),
                code="DB-3061",
            ) from None


def _pairs(parts: Mapping[int, Part]) -> list[list[int]]:
    return [[offset, part.value] for offset, part in parts.items()]


def _parts(pairs: list[list[int]]) -> dict[int, Part]:
    return {int(offset): Part(part) for offset, part in pairs}

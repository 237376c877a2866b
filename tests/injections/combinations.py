"""Which faults meet which requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dev.proxy import Api, RequestFault
from dev.proxy.protocol import TRANSACTIONAL

FAULTS: Final = (RequestFault.LATE, RequestFault.LOST_BEFORE, RequestFault.LOST_AFTER, RequestFault.DOUBLED)
ARRIVALS: Final = (Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE, Api.ADD_OFFSETS_TO_TXN, Api.TXN_OFFSET_COMMIT)
"""Late copies reach the broker right after its answer to one of these."""


@dataclass(frozen=True, slots=True, order=True)
class Combination:
    """A fault, the request that it meets, and how its transaction ends."""

    fault: str
    api: str
    end: str
    """`commit` or `abort`; `any` for requests that belong to no transaction."""

    def __str__(self) -> str:
        return f"{self.api} {self.fault}, {self.end}"

    @classmethod
    def all(cls) -> list[Combination]:
        """Every one, those with the largest number of injections first."""
        ends = dict.fromkeys(sorted(TRANSACTIONAL), ("commit", "abort")) | {Api.INIT_PRODUCER_ID: ("any",)}
        found = [cls(fault.value, api.name, end) for fault in FAULTS for api, own in ends.items() for end in own]
        return sorted(found, key=lambda one: -one.wanted)

    @property
    def wanted(self) -> int:
        """How many are injected on each version of Kafka."""
        return 1_000 if self in MANY else 50


MANY: Final = (
    Combination(RequestFault.LATE.value, Api.END_TXN.name, "commit"),
    Combination(RequestFault.LATE.value, Api.TXN_OFFSET_COMMIT.name, "commit"),
)
"""Those that tear what follows, without a new epoch."""

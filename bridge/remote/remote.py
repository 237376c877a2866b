"""store.remote of one process: its objects, adoption, and the uploads of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import BridgeError
from bridge.kafka.membership import Ownership
from bridge.remote.adoption import Adoption, Candidate
from bridge.remote.objects import Objects
from bridge.remote.uploads import Uploads
from bridge.settings.model import Settings
from bridge.start.first_commits import StartPlan
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import Manifest
from timerstore.clock import Clock
from timerstore.operations.recovery import Found
from timerstore.store import TimerStore

LOOK_S: Final = 0.2
STOP_S_MAX: Final = 2.0
"""The longest wait for a thread's last request; its later work does not count."""


class Remote:
    """See the module. `adoption` and `adopt` are the main thread's."""

    def __init__(self, uri: str, settings: Settings, clock: Clock, metrics: Metrics) -> None:
        """Raises ConfigurationError for a URI without a store."""
        self._objects = Objects(uri)
        self._group_id = settings.group_id
        self._interval_s = settings.store.flush_interval / 1_000
        self._clock = clock
        self._metrics = metrics
        self.adoption = Adoption(self._objects, settings.group_id, clock, metrics)

    def adopt(
        self, indexes: Mapping[SourceName, Found], plan: StartPlan, on_end: Callable[[], None] = lambda: None
    ) -> bool:
        """Begin the adoption of better indexes than the local ones. Returns whether there are any."""
        wanted = self.adoption.wanted(
            {
                name: Candidate(
                    found=indexes[name],
                    state=state,
                    log_start=plan.log_starts[name],
                    spare_ms=plan.spare_ms.get(name),
                )
                for name, state in plan.states.items()
            }
        )
        self.adoption.begin(wanted, on_end)
        return bool(wanted)

    def wait_for_one(
        self, names: frozenset[SourceName], is_cancelled: Callable[[], bool], beat: Callable[[], None]
    ) -> frozenset[SourceName]:
        """Wait until one of the partitions is not being adopted. Returns those that are; none after a cancel."""
        while (later := names & self.adoption.under_way()) == names:
            if is_cancelled():
                return frozenset()
            beat()
            self.adoption.wait(LOOK_S)
        return later

    def begin_uploads(
        self,
        store: Stores,
        dispatcher: Dispatcher,
        ownership: Ownership,
        announce: Callable[[SourceName, TimerStore, Manifest], None],
        on_fatal: Callable[[BridgeError], None],
    ) -> Uploads:
        """Start the uploads of these stores."""
        uploads = Uploads(
            self._objects, self._group_id, stores=lambda: store.by_name, announce=announce,
            committed=dispatcher.manifest_of, read_committed=ownership.read_committed_states,
            interval_s=self._interval_s, clock=self._clock, metrics=self._metrics, on_fatal=on_fatal,
        )  # fmt: skip
        uploads.start()
        return uploads

    def stop(self, uploads: Uploads | None, timeout_s: float) -> bool:
        """Stop the uploads, and any adoption. Returns whether no adoption changes the directory any more."""
        if uploads is not None:
            uploads.stop(min(timeout_s, STOP_S_MAX))
        return self.adoption.stop(timeout_s)

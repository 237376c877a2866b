"""bridge.start.cut_search: searches that end their process, over many processes. A scripted cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from bridge.errors import EnvironmentFailure
from bridge.ingest.batches.reading_mark import UNSEARCHED
from bridge.kafka.admin import Cluster
from bridge.kafka.leader_epochs import ReadStretch
from bridge.start.cut_search import CutSearch
from bridge.stores.names import SourceName

A, B, C = ("a", 0), ("a", 1), ("b", 0)
Cuts = dict[SourceName, int | None] | None
WANTED = {name: ReadStretch(epoch=1, start=0, end=60) for name in (A, B, C)}


class Machine:
    """Processes that search the logs, one after the other. A kill leaves the files unchanged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kills = False
        """The next searches end their process."""
        self.deadly: Collection[SourceName] = ()
        """Logs that end the process which reads them."""
        self.silent = False
        self.asked: list[set[SourceName]] = []
        self.search = CutSearch()
        self._files: dict[Path, bytes] = {}

    def cuts(self, wanted: Mapping[SourceName, ReadStretch], _: Callable[[], None]) -> dict[SourceName, int | None]:
        self.asked.append({*wanted})
        if self.kills or not wanted.keys().isdisjoint(self.deadly):
            self._files = {path: path.read_bytes() for path in self.directory.iterdir()}
            raise KeyboardInterrupt
        if self.silent:
            raise EnvironmentFailure("no answer", hint="Wait.")
        return {name: 40 if name == B else None for name in wanted}

    def start(self, wanted: Mapping[SourceName, ReadStretch] = WANTED) -> Cuts:
        """Another process searches."""
        self.search = CutSearch(directory=self.directory)
        return self.find(wanted)

    def find(self, wanted: Mapping[SourceName, ReadStretch] = WANTED) -> Cuts:
        self.asked.clear()
        try:
            return self.search.find(cast(Cluster, self), wanted, wanted)
        except KeyboardInterrupt:
            for path, content in self._files.items():
                path.write_bytes(content)
            return None


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.fault("two kills of the process in a search for cuts")
def test_kills_for_another_reason_hide_no_cut(machine: Machine) -> None:
    """After two processes that ended in one search, its logs are searched one at a time, and all of them."""
    machine.kills = True
    assert machine.start() is machine.start() is None
    machine.kills = False
    assert machine.start() == {A: None, B: 40, C: None}
    assert machine.asked == [{A}, {B}, {C}] and machine.search.alarms() == []
    assert machine.find() == machine.start() == {A: None, B: 40, C: None} and machine.asked == [{A, B, C}]


@pytest.mark.fault("a batch that holds a thousand times its size, behind an election")
@pytest.mark.parametrize(("deadly", "kills"), [({A}, 3), ({C}, 3), ({A, B}, 6), ({A, B, C}, 8)])
def test_a_log_that_ends_each_search_is_left_out_alone(machine: Machine, deadly: set[SourceName], kills: int) -> None:
    """After some ends the start goes on, cuts of all other logs are found, and each later process leaves the same logs
    out, with an alarm, until an operator removes the file."""
    machine.deadly = deadly
    for _ in range(kills):
        assert machine.start() is None
    left = sorted(WANTED.keys() & deadly)
    for _ in range(2):
        with capture_logs() as entries:
            assert machine.start() == {name: 40 if name == B else None for name in WANTED if name not in deadly}
            machine.find()
        assert [entry["event"] for entry in entries] == ["log-not-searched"], "once"
        assert [each.split()[0] for each in machine.search.alarms()] == [f"{topic}/{p}" for topic, p in left]
    machine.find({})
    machine.search.keep({C})
    assert len(machine.search.alarms()) == (C in deadly)
    machine.deadly = ()
    (machine.directory / UNSEARCHED).unlink()
    assert machine.start() == {A: None, B: 40, C: None} and machine.search.alarms() == []


def test_a_search_without_an_answer_is_repeated(machine: Machine) -> None:
    """Log by log, as before; the others do not wait for each silent one."""
    machine.kills = True
    assert machine.start() is machine.start() is None
    machine.kills, machine.silent = False, True
    assert machine.start() == {} and machine.asked == [{A}]
    machine.silent = False
    assert machine.find() == {A: None, B: 40, C: None} and machine.asked == [{A}, {B}, {C}]

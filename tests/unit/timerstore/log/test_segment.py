"""timerstore.log: what is written is read, damage is found, and a window reads only its row groups."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import timerstore.log.packed
import timerstore.log.segment
from tests.unit.timerstore.entries import Record, entries
from tests.unit.timerstore.rig import IDENTITY
from timerstore.disk.checkpoint import Identity, NamedFile
from timerstore.errors import Corrupt
from timerstore.log.segment import Segment, SegmentWriter, read, read_counts, read_rows, write
from timerstore.log.timerlog import TimerLog, Window, read_window
from timerstore.memory.pending import SLOT_MS
from timerstore.memory.sorted_runs import RowRefs
from timerstore.rows.entry import ENTRY, payload_of
from timerstore.rows.position import AT_MAX, AT_MIN, ORIGIN, Position, Positions, Progress, end_of

RECORDS = [
    Record("delay", 0, offset, 1_000 + 10 * (offset % 7), ["orders", None][offset % 2]) for offset in range(5, 65)
]


@pytest.fixture(autouse=True)
def _small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 4)


def written(directory: Path, records: list[Record], number: int = 1) -> Segment:
    directory.mkdir(exist_ok=True)
    table = entries(records)
    rows = RowRefs(
        table.column("at").to_numpy(),
        table.column("offset").to_numpy(),
        np.zeros(len(records), dtype=np.int32),
        np.arange(len(records), dtype=np.int32),
    )
    segment = write(directory, number, IDENTITY, rows.sorted(), {0: payload_of(table)})
    assert segment is not None
    return segment


def by_position(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.at_ms, r.offset))


def offsets_between(log: TimerLog, lower: Position, upper: Position) -> list[tuple[int, int]]:
    """What a gather of (lower, upper] finds in the row groups that it would read."""
    found = []
    for segment in log:
        groups = segment.groups_between(lower, upper).nonzero()[0].tolist()
        rows = ((row["at"], row["offset"]) for row in read_rows(segment, groups).to_pylist())
        found += [row for row in rows if lower < Position(*row) <= upper]
    return sorted(found)


def test_what_is_written_is_read_in_the_order_of_position(tmp_path: Path) -> None:
    """Every column of every row, by our reader and by any other."""
    segment = written(tmp_path, RECORDS)
    expected = entries(by_position(RECORDS))
    assert read_rows(segment).cast(ENTRY).equals(expected)
    assert pq.read_table(segment.path).cast(ENTRY).equals(expected)
    assert segment.rows == len(RECORDS)


def test_the_footer_answers_what_planning_asks(tmp_path: Path) -> None:
    """Positions, row groups, slots and targets are those of the rows, and opening again says the same."""
    segment = written(tmp_path, RECORDS)
    ordered = by_position(RECORDS)
    positions = [Position(r.at_ms, r.offset) for r in ordered]
    assert (segment.first, segment.last) == (positions[0], positions[-1])
    assert (segment.begin, segment.end) == (5, 65)
    assert segment.group_rows.tolist() == [4] * 15
    starts = [Position(int(at), int(o)) for at, o in zip(segment.fences.at, segment.fences.offset, strict=True)]
    assert starts == positions[::4]
    (counts,) = read_counts(segment)
    assert (counts.slots.tolist(), counts.counts.tolist()) == ([0], [60])
    assert counts.targets == {"orders": 30, "": 30}
    again = read(segment.path, IDENTITY, segment.named)
    assert (again.named, again.last, again.end) == (segment.named, segment.last, segment.end)
    assert again.fences.offset.tolist() == segment.fences.offset.tolist()


def test_counts_come_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that two row groups share counts once, and a target in one piece only."""
    monkeypatch.setattr(timerstore.log.packed, "PIECE_NUMBERS", 3)
    segment = written(tmp_path, [Record("delay", 0, i, 10_000 * (i // 3)) for i in range(21)])
    pieces = list(read_counts(segment))
    assert [piece.slots.tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [piece.counts.tolist() for piece in pieces] == [[3, 3, 3], [3, 3, 3], [3]]
    assert [piece.targets for piece in pieces] == [{"orders": 21}, {}, {}]


def test_names_of_targets_cost_no_more_than_a_thousand_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer invents them: footer, index of ids, and what is kept of both in memory, are bounded; the rows are as
    they were."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 16_384)
    few, many = (
        written(
            directory,
            [Record("delay", 0, i, 5_000, f"{i % names:0>80}", id=f"{i % 7}") for i in range(40_000)],
        )
        for directory, names in ((tmp_path / "few", 1_000), (tmp_path / "many", 40_000))
    )
    footers = [len(pq.read_metadata(segment.path).metadata[b"delay-bridge"]) for segment in (few, many)]
    assert footers[1] < footers[0] + 1_000, footers
    (counts,) = read_counts(many)
    targets = counts.targets
    assert len(targets) == 1_001 and sum(targets.values()) == 40_000
    assert few.ids is not None and many.ids is not None
    assert many.ids._file.bytes < few.ids._file.bytes + 1_000
    assert len(set(read_rows(many, columns=["target"]).column("target").to_pylist())) == 40_000


@pytest.mark.parametrize("place", ["footer", "length", "size", "missing", "empty", "another"])
def test_a_damaged_file_is_not_opened(tmp_path: Path, place: str) -> None:
    """A byte of the footer, the file's size, its absence, or another file under the name."""
    segment = written(tmp_path, RECORDS)
    content = bytearray(segment.path.read_bytes())
    if place == "footer":
        content[-200] ^= 1
    elif place == "length":
        content[-7] ^= 0x40
    elif place == "size":
        content[4:4] = b"\0"
    elif place == "empty":
        content = bytearray()
    segment.path.write_bytes(content)
    if place == "missing":
        segment.path.unlink()
    if place == "another":
        written(tmp_path, RECORDS[:40], number=1)
    with pytest.raises(Corrupt) as caught:
        read(segment.path, IDENTITY, segment.named)
    assert caught.value.path == str(segment.path)


def test_a_damaged_page_delivers_nothing_wrong(tmp_path: Path) -> None:
    """Page checksums are written and verified: a flipped byte is found, or (in a page header's statistics) changes
    nothing."""
    segment = written(tmp_path, RECORDS[:6])
    content = segment.path.read_bytes()
    expected = read_rows(segment)
    footer = int.from_bytes(content[-8:-4], "little")
    found = 0
    for place in range(4, len(content) - footer - 8, 3):
        segment.path.write_bytes(content[:place] + bytes([content[place] ^ 0x01]) + content[place + 1 :])
        try:
            same = read_rows(segment).equals(expected)
        except Corrupt:
            found += 1
        else:
            assert same, f"byte {place} of {len(content)} changed what is read"
    assert found > 0


def test_a_file_of_another_log_or_format_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name is."""
    segment = written(tmp_path, RECORDS)
    for other in (Identity(cluster_id="other", log_id=IDENTITY.log_id), Identity(cluster_id="cluster", log_id="a/1")):
        with pytest.raises(Corrupt, match="another format version, cluster or log"):
            read(segment.path, other)
    monkeypatch.setattr(timerstore.log.segment, "FORMAT_VERSION", 99)
    with pytest.raises(Corrupt, match="another format version, cluster or log"):
        read(segment.path, IDENTITY, segment.named)


def test_row_groups_between_two_positions_miss_no_row(tmp_path: Path) -> None:
    """Whatever the bounds, in the middle of a millisecond too."""
    segment = written(tmp_path, RECORDS)
    log = TimerLog()
    log.add(segment)
    ordered = by_position(RECORDS)
    keys = [(r.at_ms, r.offset) for r in ordered]
    positions = [Position(r.at_ms, r.offset) for r in ordered]
    for i in range(0, len(keys), 7):
        for j in range(i, len(keys), 5):
            assert offsets_between(log, positions[i], positions[j]) == keys[i + 1 : j + 1]
    assert offsets_between(log, ORIGIN, end_of(AT_MAX)) == keys
    assert not segment.groups_between(segment.last, end_of(AT_MAX)).any()
    assert not segment.groups_between(ORIGIN, segment.first.before()).any()


def test_rows_of_no_time_and_of_far_times_are_found(tmp_path: Path) -> None:
    """However far apart the rows are; rejects have the least slot."""
    times = [AT_MIN, AT_MIN, *(year * 366 * 86_400_000 for year in range(1, 12))]
    segment = written(
        tmp_path, [Record("delay", 0, i, None if at_ms == AT_MIN else at_ms) for i, at_ms in enumerate(times)]
    )
    log = TimerLog()
    log.add(segment)
    assert offsets_between(log, Position(AT_MIN, 0), Position(AT_MIN, 1)) == [(AT_MIN, 1)]
    assert offsets_between(log, Position(AT_MIN, 0), Position(times[3], 3)) == [
        *zip(times[1:4], (1, 2, 3), strict=True)
    ]
    assert not segment.groups_between(Position(times[3] + 20_000, 0), Position(times[4] - 20_000, 0)).any()
    assert segment.stretches.first_from(times[-1] // SLOT_MS + 2) is None


def test_rows_are_found_in_their_row_groups(tmp_path: Path) -> None:
    """The first and the last of each, and several at once."""
    segment = written(tmp_path, [Record("delay", 0, i, 5_000 + i // 7) for i in range(22)])
    at, offset = 5_000 + np.arange(22) // 7, np.arange(22)
    for i in range(22):
        assert segment.groups_at(Positions(at[i : i + 1], offset[i : i + 1])).tolist() == [i // 4]
    mixed = np.array([21, 4, 3, 8, 11, 5])
    assert segment.groups_at(Positions(at[mixed], offset[mixed])).tolist() == [0, 1, 2, 5]


def test_a_window_inside_one_millisecond_reads_only_its_row_groups(tmp_path: Path) -> None:
    """A million rows of one millisecond are loaded piece by piece."""
    segment = written(tmp_path, [Record("delay", 0, i, 5_000) for i in range(100)])
    groups = segment.groups_between(Position(5_000, 20), Position(5_000, 31)).nonzero()[0].tolist()
    assert groups == [5, 6, 7]


def test_a_window_is_read_as_its_rows_and_no_others(tmp_path: Path) -> None:
    """Of every segment, also where it begins or ends within a millisecond, and within a row group."""
    log = TimerLog()
    log.add(written(tmp_path / "a", RECORDS[::2]))
    log.add(written(tmp_path / "b", RECORDS[1::2]))
    corners = [ORIGIN, Position(1_010, 8), Position(1_010, 22), Position(1_035, 0), end_of(2_000)]
    for lower, upper in pairwise(corners):
        window = Window(lower=lower, upper=upper, segments=log.segments_between(lower, upper))
        found = read_window(window)
        assert found.schema == ENTRY
        keys = [(row["at"], row["offset"]) for row in found.to_pylist()]
        assert sorted(keys) == offsets_between(log, lower, upper)
    assert len(read_window(Window(lower=ORIGIN, upper=end_of(999), segments=()))) == 0


def test_windows_get_through_everything_within_their_budget(tmp_path: Path) -> None:
    """Each window ends before the first row group that does not fit, gets on by one at least, and none misses a row."""
    log = TimerLog()
    log.add(written(tmp_path, [Record("delay", 0, i, 5_000) for i in range(40)], number=1))
    log.add(written(tmp_path, [Record("delay", 0, 40 + i, 4_990 + i) for i in range(40)], number=2))
    log.add(written(tmp_path, [Record("delay", 0, 80 + i, 90_000) for i in range(3)], number=3))
    group_bytes = int(next(iter(log)).group_bytes.max())
    for room in (0, group_bytes, 3 * group_bytes, 1 << 30):
        lower, found, windows = ORIGIN, [], 0
        while lower < end_of(100_000):
            window = log.window(lower, end_of(100_000), room)
            assert window.lower == lower < window.upper
            between = offsets_between(log, lower, window.upper)
            assert bool(between) <= bool(window.segments)
            new_groups = sum(int(np.count_nonzero(s.groups_between(lower, window.upper))) for s in window.segments)
            assert new_groups <= max(room // group_bytes, 1) + 2 * len(log), "more row groups than fit"
            found += between
            lower = window.upper
            windows += 1
        assert found == sorted(found) and len(found) == 83
        assert windows == 1 if room == 1 << 30 else windows > 5


def test_a_stretch_without_rows_is_proved_empty(tmp_path: Path) -> None:
    """Between two slots with rows nothing has to be read: the frontier skips (invariant I3)."""
    log = TimerLog()
    log.add(written(tmp_path, [Record("delay", 0, 0, 5_000), Record("delay", 0, 1, 900_000)]))
    assert log.window(end_of(20_000), end_of(800_000), 1 << 20).segments == ()
    assert TimerLog().window(ORIGIN, end_of(1), 0).segments == ()


def test_a_segment_is_finished_when_one_step_has_passed_it(tmp_path: Path) -> None:
    """All of its offsets and positions."""
    log = TimerLog()
    segment = written(tmp_path, RECORDS)
    log.add(segment)
    passed = Progress(segment.end, segment.last)
    assert log.finished(passed) == [segment]
    assert log.finished(passed.stepped_back(segment.first)) == [segment]
    assert log.finished(Progress(segment.end, segment.last.before())) == []
    assert log.finished(Progress(segment.end - 1, segment.last)) == []


def test_damage_to_the_footer_is_found_wherever_it_is(tmp_path: Path) -> None:
    """The checkpoint holds the footer's checksum, over every byte of it."""
    segment = written(tmp_path, RECORDS[:6])
    content = segment.path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little")
    for place in [*range(len(content) - footer - 8, len(content) - 8, 7), *range(len(content) - 8, len(content))]:
        segment.path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        with pytest.raises(Corrupt):
            read(segment.path, IDENTITY, segment.named)


def test_the_name_in_the_checkpoint_is_the_identity_of_the_file(tmp_path: Path) -> None:
    """Same bytes, same name; another footer, another identity."""
    first, second = written(tmp_path, RECORDS, 1), written(tmp_path, RECORDS[1:], 2)
    assert isinstance(first.named, NamedFile)
    assert first.named.bytes == first.path.stat().st_size
    assert first.named.crc != second.named.crc
    assert pa.Table is type(read_rows(first, groups=[], columns=["at"]))


def test_a_writer_that_was_left_open_does_not_write_into_the_next_one_s_file(tmp_path: Path) -> None:
    """A store that is closed in the middle of a compaction, and opened again by the same process, takes the same number
    for another segment."""
    table = entries(RECORDS[:4])
    rows = RowRefs(
        table.column("at").to_numpy(),
        table.column("offset").to_numpy(),
        np.zeros(4, dtype=np.int32),
        np.arange(4, dtype=np.int32),
    )
    left_open = SegmentWriter(tmp_path, 1, IDENTITY)
    left_open.add(rows.sorted(), payload_of(table))
    segment = written(tmp_path, RECORDS)
    assert left_open._parquet is not None
    left_open._parquet.close()  # as when it is collected
    assert read_rows(segment).cast(ENTRY).equals(entries(by_position(RECORDS)))

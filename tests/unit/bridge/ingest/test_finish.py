"""The last step of decoding: control headers are taken out of a timer's own headers."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from bridge.ingest.finish import ControlHeaders
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from timerstore.rows.entry import HEADERS, Kind

Headers = list[tuple[str, bytes | None]]

own_headers = ControlHeaders({}).taken_out


def entries(*rows: tuple[Kind, Headers | None]) -> pa.Table:
    headers = [None if h is None else [{"key": k, "value": v} for k, v in h] for _, h in rows]
    kind = pa.array([int(kind) for kind, _ in rows], pa.int8())
    return pa.table({"kind": kind, "headers": pa.array(headers, HEADERS), "offset": pa.array(range(len(rows)))})


def left(table: pa.Table) -> list[Headers | None]:
    rows = table.column("headers").to_pylist()
    return [None if row is None else [(header["key"], header["value"]) for header in row] for row in rows]


def test_control_headers_go_and_all_others_stay_in_order_with_duplicates() -> None:
    """A timer keeps exactly its own headers."""
    own: Headers = [("b", b"1"), ("a", None), ("b", b"2")]
    mixed: Headers = [("delay-for", b"1"), own[0], ("delay-topic", b"t"), own[1], ("delay-origin", b"x"), own[2]]
    table = own_headers(entries((Kind.TIMER, mixed), (Kind.TIMER, None), (Kind.TIMER, [("delay-for", b"1")])))
    assert left(table) == [own, None, []]
    assert table.schema.names == ["kind", "headers", "offset"]
    assert table.column("offset").to_pylist() == [0, 1, 2]


def test_rejects_and_cancels_keep_all_headers() -> None:
    """What may have to leave byte for byte is not touched."""
    headers: Headers = [("delay-for", b"x"), ("a", b"1")]
    table = own_headers(entries((Kind.REJECT, headers), (Kind.CANCEL, headers), (Kind.TIMER, headers)))
    assert left(table) == [headers, headers, [("a", b"1")]]


def test_pieces_of_a_batch_are_taken_as_what_they_are() -> None:
    """Sliced and chunked tables give what whole ones give."""
    rows: list[tuple[Kind, Headers | None]] = [
        (Kind.TIMER, [("delay-for", b"1"), (f"h{i}", b"v")] if i % 3 else None) for i in range(20)
    ]
    whole = entries(*rows)
    pieces = pa.concat_tables([whole.slice(i, 7) for i in range(0, 20, 7)])
    assert left(own_headers(pieces)) == left(own_headers(whole))
    assert left(own_headers(whole.slice(4, 9))) == left(own_headers(whole))[4:13]
    assert left(own_headers(whole)) == [[(f"h{i}", b"v")] if i % 3 else None for i in range(20)]


def test_records_without_own_headers_cost_nothing() -> None:
    """A table without any is handed back as it is."""
    table = entries((Kind.TIMER, None), (Kind.TIMER, None))
    assert own_headers(table) is table


def test_a_dialect_s_headers_go_where_it_was_in_force_and_nowhere_else() -> None:
    """By partition and offset; and of originals only: in a copy they are the message's own, or a held letter's."""
    native = DecodeParameters(max_delay_ms=5, roll_window_ms=4, has_default_target=True)
    foreign, other = replace(native, dialect="rabbitmq"), replace(native, dialect="wushilin")
    all_epochs = {
        ("d", 0): tuple(DecodeEpoch(offset=o, parameters=p) for o, p in ((0, native), (10, foreign), (20, other))),
        ("d", 1): (DecodeEpoch(offset=0, parameters=native),),
        ("e", 0): (DecodeEpoch(offset=0, parameters=other),),
    }
    both: Headers = [("x-delay", b"1"), ("own", b"1"), ("publish-after-ts", b"2"), ("delay-for", b"3")]
    places = [("d", 0, 9), ("d", 0, 10), ("d", 0, 19), ("d", 0, 20), ("d", 1, 15), ("e", 0, 1), ("f", 0, 15)]
    table = entries(*[(Kind.TIMER, both)] * len(places), (Kind.TIMER, both), (Kind.REJECT, both))
    places += [("d", 0, 15), ("d", 0, 15)]
    origins = [offset for *_, offset in places[:-2]] + [3, 15]
    for i, (name, type) in enumerate((("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()))):
        column = pa.array([place[i] for place in places], type)
        table = table.drop_columns([name] if name in table.schema.names else []).append_column(name, column)
    table = table.append_column("origin", pa.array(origins, pa.int64()))
    names = [[name for name, _ in row or []] for row in left(ControlHeaders(all_epochs).taken_out(table))]
    all_own, not_x, not_p = ["x-delay", "own", "publish-after-ts"], ["own", "publish-after-ts"], ["x-delay", "own"]
    assert names[:7] == [all_own, not_x, not_x, not_p, all_own, not_p, all_own]
    assert names[7:] == [all_own, [name for name, _ in both]]

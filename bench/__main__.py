"""Measure the bridge on this machine, and print a table beside the figures of RocketMQ 5.5 and of a prototype on a
similar machine. A run begins with the speed of the machine and of a relay, and ends with ratios to it.

make bench                              everything but the scenarios below (an hour)
make bench BENCH_ARGS="--only burst"    one scenario: on-time, on-time-1k, on-time-short, kills, rolling (from the first
                                        second on), burst, idle, outage, stopped-target, killed-target, bulk
make bench BENCH_ARGS="--only costs"    CPU at rest, at 1,000/s and at 10,000/s, to compare two commits in turns
make bench BENCH_ARGS="--only pending"  ten million pending, a million of them cancelled (ten minutes, 8 GB of disk)
make bench BENCH_ARGS="--only lookups"  searches over the API among ten million pending (five minutes, 8 GB of disk)
make bench BENCH_ARGS="--only soak"     an hour at 2,000/s with broker restarts (5 GB of disk)
make bench BENCH_ARGS="--only assignment"   two instances, three million pending: one stops, returns, dies (ten minutes)
make bench BENCH_ARGS="--only rebuild"  the loss of an index: read again by a start, and made by `delay-bridge rebuild`
make bench BENCH_ARGS="--only outages"  twenty outages of the only broker at 2,000/s, and the same for a plain producer
make bench BENCH_ARGS="--only against-relay"   the bridge and a relay in turns (twenty minutes); with --rate 10000, on
                                        one core (--cores 0), on half of one (--quota 0.5), with cold brokers (--cold)
make bench BENCH_ARGS="--messages 200000"   a smaller burst
make bench BENCH_ARGS="... --save NAME"     the results also as files in bench/results, and in README
make bench BENCH_ARGS="--only costs --partitions 32"   a delay topic with 32 partitions (4 by default)
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

from bench import dead_target, results
from bench.against_relay import against_relay
from bench.assignment import assignment
from bench.bridge import PARTITIONS, WARMED, Bridge, bridge_on_broker, pause, run_program, warm_up
from bench.bulk import bulk_cancel
from bench.calibration import calibrate
from bench.costs import costs
from bench.load import VALUE_BYTES
from bench.lookups import lookups
from bench.on_time import kills, on_time, rolling
from bench.outages import outages
from bench.rebuild import rebuild
from bench.report import Report, mib, tell
from bench.soak import soak

SETTLED_SECONDS = 120
IDLE_SECONDS = 30
LEAD_MS = 30_000
OUTAGES = 4
APART = ("against-relay", "assignment", "costs", "pending", "lookups", "soak", "outages", "rebuild")
"""Scenarios that run only by name: they take long, or prove little alone."""
CLIENT_DEFAULTS = {"metadata.recovery.strategy": "rebootstrap", "reconnect.backoff.max.ms": "10000"}


def main() -> None:
    """Run the chosen scenarios."""
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("--only", choices=sorted(SCENARIOS), action="append")
    parser.add_argument("--messages", type=int, default=1_000_000, help="messages of the burst, and pending at a kill")
    parser.add_argument("--seconds", type=int, default=30, help="time before and after the loss of a target")
    parser.add_argument("--minutes", type=int, default=60, help="length of the soak")
    parser.add_argument("--outages", type=int, default=20, help="approximate number of outages of the broker")
    parser.add_argument("--partitions", type=int, default=PARTITIONS, help="partitions of the delay topic")
    parser.add_argument("--calibrated", type=int, default=10, help="seconds of each part of the calibration; 0: none")
    parser.add_argument("--save", metavar="NAME", help="write the results into bench/results")
    turns = parser.add_argument_group("against-relay")
    turns.add_argument("--turns", type=int, default=3, help="turns of the bridge and the relay")
    turns.add_argument("--first", type=int, default=120, help="seconds from ready on that belong to the start")
    turns.add_argument("--after", type=int, default=60, help="seconds after that")
    turns.add_argument("--rate", type=int, default=1_000, help="messages a second")
    turns.add_argument("--cores", type=int, nargs="+", default=(), help="the only cores of bridge and relay")
    turns.add_argument("--quota", type=float, help="their processor time, in cores, by a control group")
    turns.add_argument("--beside", type=int, default=0, help="endless loops on the same cores")
    turns.add_argument("--cold", action="store_true", help="a fresh broker for each turn")
    arguments = parser.parse_args()
    report = Report()
    for name in arguments.only or [name for name in SCENARIOS if name not in APART]:
        with bridge_on_broker(arguments.partitions) as bridge:
            if arguments.calibrated and not report.calibration:
                report.calibration = calibrate(bridge, arguments.calibrated)
                for figure, number in report.calibration.items():
                    report.add("calibration", figure, f"{number:,.2f}")
            SCENARIOS[name](bridge, arguments, report)
    report.print()
    if arguments.save:
        print(results.save(report, arguments.save))


def idle(bridge: Bridge, _arguments: argparse.Namespace, report: Report) -> None:
    """CPU and memory at rest, two minutes after the start, and two minutes after load."""
    report.add("start", "cold start to ready", f"{bridge.timed_start():.1f} s", "")
    for what in ("after the start", "after load"):
        pause(SETTLED_SECONDS)
        before, began_s = bridge.usage(), bridge.clock.monotonic_s()
        pause(IDLE_SECONDS)
        after, seconds = bridge.usage(), bridge.clock.monotonic_s() - began_s
        share = 100 * (after.cpu_s - before.cpu_s) / seconds
        report.add("idle", f"CPU {what}", f"{share:.1f} % of a core", "<= 1.5 %")
        report.add("idle", f"RSS {what}", mib(after.rss_bytes), "<= 620 MiB")
        if what == "after the start":
            warm_up(bridge)


def burst(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """A burst of messages due at one instant: ingest, delivery, memory, exactness."""
    bridge.start()
    warm_up(bridge)
    count = arguments.messages
    # After half a minute at a low rate, some code is still cold: the JVM compiles it during the first backlog.
    first = count // 2
    rate_per_s, _ = ingest_backlog(bridge, first)
    report.add("burst", f"ingest of a first backlog ({first:,})", f"{rate_per_s:,.0f}/s", ">= 150,000/s")
    bridge.wait(lambda: bridge.metric("pending_messages") == 0, 300, "delivery of the first")
    delivered = bridge.metric("records_delivered_total")
    rate_per_s, due_ms = ingest_backlog(bridge, count)
    left_ms = due_ms - bridge.clock.now_ms()
    report.add("burst", "ingest of a second backlog", f"{rate_per_s:,.0f}/s", ">= 150,000/s (; 13-26k/s)")
    report.add("burst", "ingested before due", f"{left_ms / 1000:.1f} s", "> 0")
    bridge.wait(lambda: bridge.metric("records_delivered_total") - delivered >= count, 300, "delivery")
    seconds = (bridge.clock.now_ms() - due_ms) / 1000
    report.add("burst", f"{count:,} due at one instant delivered", f"{seconds:.1f} s", "<= 4.5 s (5.7 s; 14.1 s)")
    report.add("burst", "delivery rate", f"{count / seconds:,.0f}/s", ">= 150,000/s (; 54-72k/s)")
    report.add("burst", "peak RSS", mib(bridge.peak_bytes), "<= 1,536 MiB (2.9 GiB)")
    got = receive(bridge, first + count + WARMED, 120)
    report.add(
        "burst", "received / doubled / early", f"{got['received']:,} / {got['doubled']} / {got['early']}", "all / 0 / 0"
    )


def ingest_backlog(bridge: Bridge, count: int) -> tuple[float, int]:
    """Send messages due at one instant while the bridge is suspended. Returns records ingested a second, and the due
    time (epoch ms).
    """
    ingested = bridge.metric("records_ingested_total")
    due_ms = bridge.clock.now_ms() + LEAD_MS + count // 20
    with bridge.frozen():
        run_program(bridge, "load", "--messages", str(count), "--due", str(due_ms)).wait()
    began_s = bridge.clock.monotonic_s()
    bridge.wait(lambda: bridge.metric("records_ingested_total") - ingested >= count, 300, "ingest")
    return count / (bridge.clock.monotonic_s() - began_s), due_ms


def outage(bridge: Bridge, _arguments: argparse.Namespace, report: Report) -> None:
    """The only broker is killed under load and comes back: the time until the next delivery, beside the same with the
    client's defaults.
    """
    for how, properties in (("with its own settings", {}), ("with the client's defaults", CLIENT_DEFAULTS)):
        bridge.configure({"kafka": {"producer": properties}})
        bridge.start()
        warm_up(bridge)
        seconds = sorted(_outage(bridge) for _ in range(OUTAGES))
        figures = " / ".join(f"{second:.1f}" for second in seconds)
        report.add("outage", f"broker answers, to the first delivery, {how}", f"{figures} s")
        bridge.wait(lambda: bridge.metric("pending_messages") == 0, 120, "the rest")
        bridge.stop()


def _outage(bridge: Bridge) -> float:
    run_program(bridge, "load", "--messages", "20000", "--delay", "1000", "30000").wait()
    before = bridge.metric("records_delivered_total")
    bridge.wait(lambda: bridge.metric("records_delivered_total") - before > 1_000, 60, "some")
    bridge.broker.kill()
    delivered = bridge.metric("records_delivered_total")
    bridge.broker.start()
    began_s = bridge.clock.monotonic_s()
    bridge.wait(lambda: bridge.metric("records_delivered_total") > delivered, 120, "delivery")
    return bridge.clock.monotonic_s() - began_s


def dead(bridge: Bridge, arguments: argparse.Namespace, report: Report, *, killed: bool = False) -> None:
    """One of ten targets goes away: the lateness of the others before, and from a second after the loss."""
    scenario = "killed target" if killed else "stopped target"
    bridge.start()
    warm_up(bridge)
    windows = dead_target.measure(bridge, arguments.seconds, killed=killed)
    for name, late in windows.items():
        report.add(scenario, f"{name}: record timestamp - due p50 / p99 / p99.9", tell(late["stamped_ms"]))
        report.add(scenario, f"{name}: arrival - due p50 / p99 / p99.9", tell(late["arrived_ms"]))
    for what in ("stamped_ms", "arrived_ms"):
        grown = windows["after"][what]["p99"] - windows["before"][what]["p99"]
        words = "record timestamp" if what == "stamped_ms" else "arrival"
        report.add(scenario, f"p99 of the other nine ({words}) grows by", f"{grown:.0f} ms", "< 50 ms")
    report.add(scenario, "retried", f"{bridge.metric('records_retried_total'):,.0f}", "")


def pending(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """Ten times --messages due in a minute to thirty days; a tenth of them cancelled; then SIGKILL and a restart."""
    bridge.start()
    cancelled, count = arguments.messages, 10 * arguments.messages
    delays = ("--delay", "60000", str(30 * 86_400_000), "--mixed", "--ids", str(cancelled))
    began_s = bridge.clock.monotonic_s()
    run_program(bridge, "load", "--messages", str(count), *delays).wait()
    bridge.wait(lambda: bridge.metric("records_ingested_total") >= count, 900, "ingest")
    seconds = bridge.clock.monotonic_s() - began_s
    name = f"{count / 1_000_000:g}M pending"
    report.add(name, "sent and ingested", f"{count / seconds:,.0f}/s", "")
    report.add(name, "peak RSS, while they are sent", mib(bridge.peak_bytes), "<= 1,434 MiB")
    before, began_s = bridge.metric("pending_messages"), bridge.clock.monotonic_s()
    run_program(bridge, "load", "--messages", str(cancelled), "--cancel").wait()
    bridge.wait(lambda: bridge.metric("records_ingested_total") >= count + cancelled, 600, "cancels")
    report.add(name, f"{cancelled:,} cancels", f"{cancelled / (bridge.clock.monotonic_s() - began_s):,.0f}/s", "")
    gone = before - bridge.metric("pending_messages")
    report.add(name, "left the gauge, also by delivery", f"{gone:,.0f}", f">= {cancelled:,} - due before")
    report.add(name, "peak RSS, after the cancels", mib(bridge.peak_bytes), "<= 1,434 MiB")
    flushed = bridge.clock.monotonic_s()
    bridge.wait(lambda: bridge.clock.monotonic_s() - flushed > 65, 120, "the last flush")
    report.add(name, "RSS with them pending", mib(bridge.rss_bytes()), "<= 1,434 MiB")
    left = bridge.metric("pending_messages")
    payload = (left + cancelled) * (VALUE_BYTES + len("key-1234"))
    share = bridge.disk_bytes() / payload
    report.add(name, "disk / payload and keys, cancelled ones included", f"{share:.2f}", "<= 1.3")
    bridge.end()
    run_program(bridge, "load", "--messages", "1", "--rate", "1", "--delay", "1", "2").wait()
    began_s = bridge.clock.monotonic_s()
    bridge.start()
    bridge.wait(lambda: bridge.metric("records_delivered_total") >= 1, 120, "the first delivery")
    report.add(name, "restart to first delivery", f"{bridge.clock.monotonic_s() - began_s:.1f} s", "<= 5 s")
    report.add(name, "pending after it", f"{bridge.metric('pending_messages'):,.0f}", f"about {left:,.0f}")


def receive(bridge: Bridge, count: int, seconds: int) -> dict[str, Any]:
    """Read the targets to the end."""
    return result(run_program(bridge, "receive", "--messages", str(count), "--seconds", str(seconds)))


def result(reader: subprocess.Popen[str]) -> dict[str, Any]:
    """The output of a receiver."""
    text, _ = reader.communicate()
    received: dict[str, Any] = json.loads(text)
    return received


READY, COLD, FIRST, WARM, ALL = (0, 5), (0, 30), (5, 30), (120, 150), (5, 150)
LATE_SHORT = {READY: "max <= 300 ms", COLD: "p99 <= 150 ms", WARM: "<= 5 / 25 ms"}
LATE_10K = {FIRST: "<= 5 / 30 ms", WARM: "<= 5 / 30 ms", ALL: "<= 5 / 30 ms"}

SCENARIOS: dict[str, Callable[[Bridge, argparse.Namespace, Report], None]] = {
    "idle": idle,
    "against-relay": against_relay,
    "costs": costs,
    "on-time": partial(on_time, delay_ms=(1_000, 5_000), rate=10_000, late=LATE_10K, cpu="70"),
    "on-time-1k": partial(on_time, delay_ms=(1_000, 5_000), rate=1_000, late={}, cpu="30"),
    "on-time-short": partial(on_time, delay_ms=(100, 300), rate=1_000, late=LATE_SHORT, cpu="30"),
    "kills": kills,
    "rolling": rolling,
    "assignment": assignment,
    "burst": burst,
    "outage": outage,
    "stopped-target": dead,
    "killed-target": partial(dead, killed=True),
    "pending": pending,
    "lookups": lookups,
    "rebuild": rebuild,
    "bulk": bulk_cancel,
    "soak": soak,
    "outages": outages,
}

if __name__ == "__main__":
    main()

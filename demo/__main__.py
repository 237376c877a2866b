"""`python -m demo`. Exit status: 0 after a correct run, 1 after lost, doubled or early messages, else the error's."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from confluent_kafka import KafkaException
from rich.console import Console

from bridge.errors import BridgeError, EnvironmentFailure
from demo.scenario import Names, Scenario, topics
from dev.broker import EmbeddedBroker
from timerstore.clock import SystemClock

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.messages < 4 or options.rate <= 0:
        parser.error("there must be at least 4 messages, at a rate above 0")
    console = Console()
    signal.signal(signal.SIGTERM, _terminate)
    directory = Path(tempfile.mkdtemp(prefix="delay-bridge-demo-"))
    keep = True
    try:
        with ExitStack() as stack:
            bootstrap = options.bootstrap
            if bootstrap is None:
                console.print("Starting a Kafka broker (the first time Maven fetches its jars) ...")
                bootstrap = stack.enter_context(EmbeddedBroker()).bootstrap
                console.print(f"Kafka listens on {bootstrap}", highlight=False)
            kafka = {**options.property, "bootstrap.servers": bootstrap}
            names = Names(run=uuid.uuid4().hex[:6])
            stack.enter_context(topics(kafka, names))
            scenario = Scenario(
                kafka,
                names,
                directory,
                console,
                SystemClock(),
                messages=options.messages,
                rate_s=options.rate,
                seed=options.seed,
            )
            balance = scenario.run()
            if options.keep and balance.good:
                scenario.stay()
        keep = not balance.good
        console.print(
            "[bold green]every message arrived once, none before its time"
            if balance.good
            else "[bold red]the delivery was wrong: see the summary"
        )
        return 0 if balance.good else 1
    except BridgeError as error:
        console.print(str(error.message), style="bold red", highlight=False, markup=False)
        console.print(error.hint, highlight=False, markup=False, soft_wrap=True)
        return error.exit_code
    except AssertionError as failure:  # the harness raises it
        console.print(str(failure), style="bold red", highlight=False, markup=False)
        return EnvironmentFailure.exit_code
    except KafkaException as error:
        console.print(f"Kafka: {error.args[0]}", style="bold red", highlight=False, markup=False)
        return EnvironmentFailure.exit_code
    except KeyboardInterrupt:
        keep = False
        console.print("interrupted")
        return INTERRUPTED
    finally:
        if keep:
            console.print(f"The bridge's log and data are in {directory}", highlight=False)
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="use this cluster instead of starting a broker")
    parser.add_argument(
        "--property",
        action=_Property,
        default={},
        metavar="NAME=VALUE",
        help="a client property for that cluster, in librdkafka's spelling; may be repeated",
    )
    parser.add_argument("--messages", type=int, default=4_000, help="number of messages (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=500, help="messages a second (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the bridge and its page running until Ctrl-C")
    parser.add_argument("--seed", type=int, default=1, help="seed of delays, targets and keys (default: %(default)s)")
    return parser


class _Property(argparse.Action):
    """Collects NAME=VALUE into a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        name, equals, value = str(values).partition("=")
        if not equals:
            parser.error(f"{option_string} needs NAME=VALUE, not {values}")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: value})


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # unwinding ends the broker and the bridge


if __name__ == "__main__":
    sys.exit(main())

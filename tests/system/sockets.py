"""The TCP sockets of processes, as the kernel lists them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil

Address = tuple[str, int]


class Socket(NamedTuple):
    """`there` is None while it listens."""

    here: Address
    there: Address | None


def listening(processes: Iterable[psutil.Process]) -> set[Address]:
    """The addresses at which these processes listen."""
    return {each.here for each in _sockets(processes) if each.there is None}


def connected(processes: Iterable[psutil.Process]) -> set[Address]:
    """The addresses that these processes have connected to: neither accepted connections nor those among themselves."""
    found = _sockets(processes)
    own = {each.here for each in found if each.there is None}
    return {each.there for each in found if each.there is not None and not own & {each.here, each.there}}


def files(process: psutil.Process) -> set[str]:
    """All paths that a process names or has open: its arguments, working directory, open and mapped files."""
    mapped = {each.path for each in process.memory_maps()}
    return {*process.cmdline(), process.cwd(), *(each.path for each in process.open_files()), *mapped}


def _sockets(processes: Iterable[psutil.Process]) -> list[Socket]:
    found: list[Socket] = []
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.append(Socket(_plain(*each.laddr), None))
                elif each.raddr:
                    found.append(Socket(_plain(*each.laddr), _plain(*each.raddr)))
    return found


def _plain(host: str, port: int) -> Address:
    return host.removeprefix("::ffff:"), port

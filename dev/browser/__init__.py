"""A Chromium for the tests of the page, and axe, which finds obstacles for some readers; no part of the product.

Both are npm packages, pinned with their hashes: one has a headless Chromium for 64-bit x86, compressed, with the
libraries and fonts that a machine without a desktop lacks. Nothing needs root, and nothing is installed outside the
cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure
from bridge.install.maven import locked
from dev.broker.embedded import CACHE_VARIABLE

HERE: Final = Path(__file__).parent
PACKED: Final = Path("node_modules", "@sparticuz", "chromium", "bin")
INFLATE: Final = "process.stdin.pipe(require('node:zlib').createBrotliDecompress()).pipe(process.stdout)"
INSTALL_S_MAX: Final = 600
FONTS: Final = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir>{cache}</cachedir></fontconfig>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Browser:
    """The places of the program and axe's script, and the program's environment."""

    program: Path
    environment: dict[str, str]
    axe: Path


def browser() -> Browser:
    """Installed at first use, and kept. Raises EnvironmentFailure without npm, or where npm fails."""
    digest = hashlib.sha256((HERE / "package-lock.json").read_bytes() + FONTS.encode()).hexdigest()[:12]
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path(__file__).parents[2] / ".cache").resolve()
    into = cache / "browser" / digest
    if not into.is_dir():
        into.parent.mkdir(parents=True, exist_ok=True)
        with locked(into.with_name(f".{digest}.lock")):
            if not into.is_dir():
                _install(into)
    environment = {"LD_LIBRARY_PATH": str(into / "lib"), "FONTCONFIG_FILE": str(into / "fonts.conf")}
    return Browser(program=into / "chromium", environment=environment, axe=into / "axe.min.js")


def _install(into: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise EnvironmentFailure("npm is not on the PATH", hint="Install it (Debian: apt-get install npm).")
    with tempfile.TemporaryDirectory(prefix=".browser.", dir=into.parent) as scratch:
        packages, made = Path(scratch, "packages"), Path(scratch, "made")
        packages.mkdir()
        made.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, packages)
        _run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], packages)
        for archive in ("al2023.tar.br", "fonts.tar.br"):
            _run([node, "-e", INFLATE], packages, packages / PACKED / archive, made / "archive.tar")
            with tarfile.open(made / "archive.tar") as found:
                found.extractall(made, filter="data")
        (made / "archive.tar").unlink()
        _run([node, "-e", INFLATE], packages, packages / PACKED / "chromium.br", made / "chromium")
        (made / "chromium").chmod(0o755)
        (made / "fonts.conf").write_text(FONTS.format(cache=into / "font-cache"))
        shutil.copy(packages / "node_modules" / "axe-core" / "axe.min.js", made)
        made.rename(into)


def _run(command: list[str], directory: Path, source: Path | None = None, target: Path | None = None) -> None:
    """Run it, with a file as its input and another as its output, if they are given."""
    log = directory / "run.log"
    with Path(source or os.devnull).open("rb") as input_, (target or log).open("wb") as output:
        try:
            done = subprocess.run(
                command, cwd=directory, stdin=input_, stdout=output, stderr=subprocess.PIPE, timeout=INSTALL_S_MAX,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise EnvironmentFailure("npm did not finish in time", hint="Check the network, then try again.") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise EnvironmentFailure("npm could not fetch the browser", hint="Check its registry.", output=said)

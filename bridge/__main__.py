"""The command `delay-bridge`, and `python -m bridge`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or name the missing package: the installation for producers lacks Spark and others."""
    try:
        from bridge.commands.cli import main as run
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in ("bridge", "timerstore"):
            raise
        print(
            f"delay-bridge: {missing.name} is not installed. Install the bridge with its dependencies:"
            " pip install 'delay-bridge[bridge]'",
            file=sys.stderr,
        )
        sys.exit(3)
    run()


if __name__ == "__main__":
    main()

"""`python -m bridge`."""

from bridge.commands.cli import main

if __name__ == "__main__":
    main()

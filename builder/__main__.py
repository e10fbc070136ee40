"""``python -m builder``: the same command as ``rolecall``."""

from builder.cli import main

if __name__ == "__main__":
    main()

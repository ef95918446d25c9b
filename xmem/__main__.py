"""Runs the command line: `python -m xmem`."""

from xmem.cli import main

if __name__ == "__main__":
    main()

"""`python -m ringlet`: the command line (cli/main.py)."""

import sys

from ringlet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

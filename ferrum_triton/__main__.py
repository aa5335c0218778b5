"""``python -m ferrum_triton``: the command line."""

import sys

from ferrum_triton.cli import main

if __name__ == "__main__":
    sys.exit(main())

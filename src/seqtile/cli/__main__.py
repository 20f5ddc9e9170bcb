"""``python -m seqtile.cli``."""

import sys

from seqtile.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m seqtile.cli``."""

from seqtile.cli import console

if __name__ == "__main__":
    console()

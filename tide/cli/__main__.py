"""``python -m tide.cli``."""

from tide.cli import main

main()

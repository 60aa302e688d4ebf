"""``python -m harness`` is ``rolloutcheck``."""

from harness.cli import main

main()

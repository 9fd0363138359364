"""``python -m outrider``: the same as the command ``outrider``."""

from outrider.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m outrider`` runs the command ``outrider``."""

from outrider.cli import run

if __name__ == "__main__":
    run()

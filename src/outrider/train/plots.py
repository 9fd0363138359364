"""Training curve of one run as JSON and PNG."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from outrider.errors import how_to_install

logger = logging.getLogger(__name__)

MAX_POINTS = 400
SHARES = ("hit_", "held_")  # keys that are shares between 0 and 1, not losses


def thin(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce to at most `MAX_POINTS` points by local averages; evaluations are kept."""
    size = max(1, -(-len(curve) // MAX_POINTS))
    points = []
    for start in range(0, len(curve), size):
        group = curve[start : start + size]
        point = dict(group[-1])
        for key in {key for member in group for key in member} - {"step", "tokens", "seconds"}:
            values = [member[key] for member in group if key in member]
            numbers = [value for value in values if isinstance(value, float)]
            point[key] = round(sum(numbers) / len(numbers), 4) if numbers else values[-1]
        points.append(point)
    return points


def draw(name: str, run: Path, folder: Path) -> None:
    """Write `<name>_curve.json` and, if matplotlib is installed, `<name>_curve.png`, of the run in the folder ``run``."""
    points = thin(json.loads((run / "curve.json").read_text()))
    lines = ",\n".join(json.dumps(point) for point in points)
    (folder / f"{name}_curve.json").write_text(f"[\n{lines}\n]\n")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no loss curve: matplotlib is missing; %s", how_to_install("report"))
        return
    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    keys = sorted({key for point in points for key, value in point.items() if isinstance(value, float)} - {"seconds"})
    for key in keys:
        chosen = [point for point in points if key in point]
        wide = 1.6 if key in ("loss", "kl") else 0.8
        side = right if key.startswith(SHARES) else left
        side.plot([p["tokens"] / 1e6 for p in chosen], [p[key] for p in chosen], label=key, linewidth=wide)
    measured = [point for point in points if "bpb" in point]
    for source in measured[-1]["bpb"] if measured else ():
        values = [point["bpb"][source] for point in measured]
        wide = 2.5 if source == "total" else 1.0
        right.plot([p["tokens"] / 1e6 for p in measured], values, marker=".", label=source, linewidth=wide)
    left.set(title=f"{name}: training", xlabel="million tokens", ylabel="nats per token")
    if measured:
        right.set(title=f"{name}: held-out documents", xlabel="million tokens", ylabel="bits per byte")
    else:
        right.set(title=f"{name}: agreement with the target", xlabel="million tokens", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / f"{name}_curve.png", dpi=110)

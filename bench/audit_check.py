"""Measure the false alarm rate of the audit: repeat it on a lossless method with different seeds.

    python bench/audit_check.py --audits 20 --out results/audit-repeated.json
    python bench/audit_check.py --method ngram --tv 0.1

An audit that does not certify the method is a false alarm. The check passes if at most one of twenty audits is a false alarm or
void; otherwise the exit code is 1. The last line of output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from outcome import count, finish, parsed, parser_of

from outrider.bench.provenance import origin

ALARMS = 0.05  # maximum share of audits with a false alarm
WHERE = ("device", "dtype", "threads", "target")  # keys of an audit's document to keep, besides the usual provenance


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--audits", type=count, default=20)
    parser.add_argument("--method", default="draft")
    parser.add_argument("--tv", type=float, default=0.2)
    args = parsed(parser)
    started, audits, where = perf_counter(), list[dict[str, Any]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, args.audits + 1):
            where, audit = audited(args, seed, Path(folder) / "audit.json")
            audits.append(audit)
            left = (perf_counter() - started) / seed * (args.audits - seed)
            print(f"seed {seed}: {audits[-1]['verdicts']}, {left / 60:.1f} min left", file=sys.stderr, flush=True)
    alarms = sum(not audit["certified"] for audit in audits)
    caught = all(control["caught"] for audit in audits for control in audit["controls"])
    result = {
        **origin(),
        **where,
        "methods": args.method,
        "tv": args.tv,
        "audits": audits,
        "alarms": alarms,
        "every_control_caught": caught,
        "seconds": round(perf_counter() - started, 1),
        "holds": alarms <= ALARMS * args.audits and caught,
    }
    return finish(result, args.out)


def audited(args: argparse.Namespace, seed: int, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the command with one seed. Returns its environment and the parts of its document to keep."""
    words = ["audit", "--method", args.method, "--tv", str(args.tv), "--seed", str(seed), "--out", str(out)]
    run = subprocess.run([sys.executable, "-m", "outrider", *words], capture_output=True, text=True)
    if not out.exists():
        said = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        raise SystemExit(f"error: the audit with seed {seed} ended without a result: {said[0].removeprefix('error: ')}")
    found = json.loads(out.read_text())
    out.unlink()
    return {key: found[key] for key in WHERE}, {
        "seed": seed,
        "certified": found["certified"],
        "verdicts": [method["verdict"] for method in found["methods"]],
        "controls": [control for method in found["methods"] for control in method["sampling"]["controls"]],
    }


if __name__ == "__main__":
    sys.exit(main())

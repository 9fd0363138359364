"""Inject system faults and check how each command reacts. Needs Linux and root, for mounts and memory groups.

    python bench/faults.py --out results/faults.json --page docs/faults.md
    python bench/faults.py --only disk            # only faults whose name begins with "disk"

The commands are the user's commands, run as separate processes on the embedded family. A fault passes if the command ends (or
the server continues) as docs/faults.md promises: with a documented exit code, a one-line error, no traceback, and without
losing completed work. Exit code 1 if any fault does not pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from fault_place import GENERATE, LIMIT, PROMPT, Broken, Ended, Place, call, copied_target, ended, expect, full, until
from outcome import finish, parsed, parser_of
from processes import children

from outrider.bench.provenance import origin
from outrider.types import OutriderError

TRAIN = ("train", "medusa", "--heads", "2", "--epochs", "0.2", "--batch-tokens", "512", "--seq-len", "64")
NUM_SIGNALS = 12  # per command, spread over its run time
GROUPS = Path("/sys/fs/cgroup")  # control groups, version 1
THROTTLE = GROUPS / "blkio" / "blkio.throttle.read_bps_device"
MEMORY_LIMIT = "memory.limit_in_bytes"

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
// Real time jumps forward and back by a day every half second of monotonic time. Monotonic time is unchanged.
typedef int (*Clock)(clockid_t, struct timespec*);
static Clock real(void) { static Clock found; if (!found) found = (Clock)dlsym(RTLD_NEXT, "clock_gettime"); return found; }
static long jump(void) {
  struct timespec now; real()(CLOCK_MONOTONIC, &now);
  return ((now.tv_sec * 2 + now.tv_nsec / 500000000) % 3 - 1) * 86400;
}
int clock_gettime(clockid_t which, struct timespec* to) {
  int code = real()(which, to);
  if (code == 0 && which == CLOCK_REALTIME) to->tv_sec += jump();
  return code;
}
time_t time(time_t* to) {
  struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
  if (to) *to = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval* to, void* zone) {
  (void)zone; struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
  to->tv_sec = now.tv_sec; to->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


# Each fault is a function of a Place that returns what was observed. Its docstring is the promise.


def disk_full_cache(place: Place) -> str:
    """Same text as without the fault, and one warning."""
    with place.disk("64k") as folder:
        full(folder)
        done = place.run(*GENERATE, "--compile", "never", OUTRIDER_CACHE=folder)
        expect(done.err.count("cache folder") == 1, f"expected exactly one warning: {done.err[-600:]}")
        return done.expect_text(place.wanted()) + ", one warning"


def disk_read_only_cache(place: Place) -> str:
    """Same text as without the fault, and one warning."""
    with place.disk("1m") as folder:
        call("mount", "-o", "remount,ro", folder)
        done = place.run(*GENERATE, "--compile", "never", OUTRIDER_CACHE=folder)
        expect(done.err.count("cache folder") == 1, f"expected exactly one warning: {done.err[-600:]}")
        return done.expect_text(place.wanted()) + ", one warning"


def disk_full_standard_output(place: Place) -> str:
    """One-line error, exit code 1."""
    process = subprocess.run(
        f"{sys.executable} -m outrider generate -k 4 --json --max-tokens 8 hello > /dev/full",
        shell=True, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    return Ended(process.returncode, "", process.stderr).expect_error(1)


def disk_full_training(place: Place) -> str:
    """One-line error, exit code 1. With free space, the same command resumes from its checkpoint and finishes."""
    with place.disk("24m") as folder:
        words = (*TRAIN, "--text", place.text(), "--out", folder / "head")
        first = place.run(*words).expect_error(1)
        expect(not (folder / "head" / "config.json").exists(), "an incomplete head was left")
        call("mount", "-o", "remount,size=2g", folder)
        again = place.run(*words)
        expect(again.code == 0, f"it did not resume: {again.err[-600:]}")
        return f"{first}; then it resumed"


def disk_full_export(place: Place) -> str:
    """One-line error, exit code 1 or 2, and no incomplete folder that looks complete."""
    with place.disk("64k") as folder:
        full(folder)
        target = copied_target(place.folder / "target")
        words = ("export", "--to", "vllm", "--target", target, "--method", "ngram", "--out", folder / "made")
        said = place.run(*words).expect_error(1, 2)
        expect(not (folder / "made" / "run.sh").exists(), "an incomplete export was left")
        return said


def disk_read_only_output(place: Place) -> str:
    """One-line error, exit code 1 or 2, before anything is loaded."""
    with place.disk("1m") as folder:
        call("mount", "-o", "remount,ro", folder)
        started = time.monotonic()
        said = place.run("bench", "--out", folder / "out.json").expect_error(1, 2)
        expect(time.monotonic() - started < 60, "the error took more than 60 s")
        return said


def weights_cut_short(place: Place) -> str:
    """One-line error, exit code 2."""
    target = copied_target(place.folder / "short")
    weights = next(target.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    return place.run(*GENERATE, "--target", target).expect_error(2)


def weights_that_cannot_be_read(place: Place) -> str:
    """One-line error, exit code 2."""
    with place.mounted_image() as (image, mounted):
        target = mounted / "target"
        call("umount", mounted)
        call("mount", "-o", "loop,ro", image, mounted)  # so that none of it is in the page cache
        for name in ("config.json", *(file.name for file in target.glob("*.safetensors"))):
            with (target / name).open("rb") as file:
                file.read(4096)
        os.truncate(image, 12 << 20)  # reads beyond this offset fail, as on a failing disk
        return place.run(*GENERATE, "--target", target).expect_error(2)


def weights_read_slowly(place: Place) -> str:
    """Same text as without the fault."""
    words = ("generate", "--max-tokens", "24", "--temperature", "0")
    wanted = place.run(*words, "-k", "0", PROMPT).out
    with place.mounted_image() as (_, mounted):
        found = subprocess.run(["findmnt", "-no", "MAJ:MIN", mounted], capture_output=True, text=True, check=True)
        device = found.stdout.strip()
        call("sync")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        THROTTLE.write_text(f"{device} 1000000")
        try:
            started = time.monotonic()
            done = place.run(*words, "--method", "ngram", "--target", mounted / "target", PROMPT)
            return f"{done.expect_text(wanted)}, after {time.monotonic() - started:.0f} s"
        finally:
            THROTTLE.write_text(f"{device} 0")


def memory_at_load(place: Place) -> str:
    """One-line error, exit code 1 or 2."""
    target = copied_target(place.folder / "large")
    grow(next(target.glob("*.safetensors")), 6 << 30)
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (4 << 30,) * 2)
    return place.run(*GENERATE, "--target", target, under=limit).expect_error(1, 2)


def memory_group_at_load(place: Place) -> str:
    """One-line error before the weights are loaded, exit code 2, because the group's limit is below the size of the weights."""
    group = GROUPS / "memory" / f"outrider-{os.getpid()}"
    group.mkdir()
    target = copied_target(place.folder / "large")
    grow(next(target.glob("*.safetensors")), 900 << 20)
    try:
        (group / MEMORY_LIMIT).write_text(str(800 << 20))

        def join() -> None:
            (group / "tasks").write_text("0")

        return place.run(*GENERATE, "--target", target, under=join).expect_error(2)
    finally:
        until(lambda: not (group / "tasks").read_text().strip(), "the group is empty")
        group.rmdir()


def grow(weights: Path, size: int) -> None:
    """Add a sparse tensor of ``size`` bytes to a safetensors file."""
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = len(content) - 8 - length
    header["filling"] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [end, end + size]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with weights.open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed + content[8 + length :])
        file.truncate(file.tell() + size)


def memory_while_serving(place: Place) -> str:
    """A request that does not fit into memory gets an error; the server continues."""
    with place.serving("--compile", "never", "--max-batch", "32") as server:
        wanted = server.ask()[1]
        used = int(Path(f"/proc/{server.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        limit(server.pid, used + (4 << 20))
        answers = [server.ask("word " * 300, n=32, max_tokens=200, temperature=1.0) for _ in range(2)]
        limit(server.pid, resource.RLIM_INFINITY)
        server.expect_text(wanted)
        statuses = [status for status, _ in answers]
        expect(all(status in (200, 500, 503) for status in statuses), str(answers))
        expect(500 in statuses or 503 in statuses, f"memory did not run out: {statuses}")
        said = next(text for status, text in answers if status >= 500)
        expect("\n" not in said, said)
        return f"{statuses}: {said}; then the same text"


def limit(pid: int, size: int) -> None:
    """Set the address space limit of a process."""
    resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def worker_killed(place: Place) -> str:
    """All answers are correct; killed workers are replaced."""
    with place.serving("--compile", "never") as server:
        wanted = server.ask()[1]
        for _ in range(5):
            for child in children(server.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            server.expect_text(wanted)
        return "5 of 5 correct answers"


def clock_jumps(place: Place) -> str:
    """Same text as without the fault; no time limit triggers, and no duration is negative."""
    source, library = place.folder / "clock.c", place.folder / "clock.so"
    source.write_text(CLOCK)
    call("cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl")
    done = place.run(*GENERATE, "--json", LD_PRELOAD=library)
    expect(done.code == 0, done.err[-600:])
    found = json.loads(done.out)
    expect(found["text"].strip() == place.wanted().removeprefix(PROMPT).strip(), f"different text: {found['text']!r}")
    expect(all(not isinstance(value, (int, float)) or value >= 0 for value in found.values()), str(found))
    with place.serving("--compile", "never", "--request-timeout", "30", LD_PRELOAD=library) as server:
        answers = [server.ask(max_tokens=64) for _ in range(8)]
        expect(len(set(answers)) == 1 and answers[0][0] == 200, str(answers))
        expect(httpx.get(f"{server.url}/ready", timeout=5).is_success, "not ready")
    return "the same text; 8 of 8 server answers"


def signal_while_generating(place: Place) -> str:
    """Exit code 130 and one line in every phase: start, load, compile, prefill, decode."""
    return swept(place, ("generate", "-k", "4", "--max-tokens", "900", "--ignore-eos", PROMPT), "tok/s")


def signal_while_exporting(place: Place) -> str:
    """Exit code 130 and one line; the export is either complete or absent."""
    folder = place.folder / "exported"

    def whole() -> None:
        files = {path.name for path in folder.glob("*")} if folder.exists() else set()
        expect(not files or "run.sh" in files, f"incomplete export: {files}")

    words = ("export", "--to", "vllm", "--target", copied_target(place.folder / "target"), "--method", "ngram", "--out", folder)
    return swept(place, words, "own-code", whole)


def signal_while_training(place: Place) -> str:
    """Exit code 130 and one line; the same command resumes and trains the same head as an uninterrupted run."""
    words = (*TRAIN, "--text", place.text(), "--out")
    unbroken = place.run(*words, place.folder / "unbroken")
    expect(unbroken.code == 0, unbroken.err[-600:])
    said = swept(place, (*words, place.folder / "broken"), "--method medusa")
    last = place.run(*words, place.folder / "broken")
    expect(last.code == 0, last.err[-600:])
    heads = [next((place.folder / name).glob("*.safetensors")).read_bytes() for name in ("unbroken", "broken")]
    expect(heads[0] == heads[1], "the head differs from that of an uninterrupted run")
    return f"{said}; then the same head as in an uninterrupted run"


def swept(place: Place, words: tuple[object, ...], last_words: str, check: Callable[[], None] = lambda: None) -> str:
    """Interrupt a command at times spread over its run. ``last_words``: its output when its work is done."""
    started = time.monotonic()
    expect(place.run(*words).code == 0, "the command fails without a signal")
    took, were_done = time.monotonic() - started, []
    for index in range(NUM_SIGNALS):
        process = place.start(*words)
        time.sleep(0.8 + (took - 0.8) * index / NUM_SIGNALS)
        process.send_signal(signal.SIGTERM if index % 2 else signal.SIGINT)
        done = ended(process)
        is_done = last_words in done.err and "interrupted" not in done.err
        were_done.append(is_done)
        expect("Traceback" not in done.err, f"after signal {index}: {done.err[-900:]}")
        # Python exits by SIGINT if it is interrupted during exec() of source text; a shell reports 130 for both.
        ends = (0, -signal.SIGTERM, -signal.SIGINT) if is_done else (130, -signal.SIGINT)
        expect(done.code in ends, f"exit code {done.code} after signal {index}: {done.err[-600:]}")
        expect(is_done or "interrupted" in done.err, f"no message after signal {index}: {done.err[-300:]}")
        check()
    return f"{were_done.count(False)} times exit 130, {were_done.count(True)} times the command finished first"


FAULTS: tuple[Callable[[Place], str], ...] = (
    disk_full_cache,
    disk_read_only_cache,
    disk_full_standard_output,
    disk_full_training,
    disk_full_export,
    disk_read_only_output,
    weights_cut_short,
    weights_that_cannot_be_read,
    weights_read_slowly,
    memory_at_load,
    memory_group_at_load,
    memory_while_serving,
    worker_killed,
    clock_jumps,
    signal_while_generating,
    signal_while_training,
    signal_while_exporting,
)
NEED_GROUPS = {weights_read_slowly: THROTTLE, memory_group_at_load: GROUPS / "memory" / MEMORY_LIMIT}


def name_of(fault: Callable[[Place], str]) -> str:
    return fault.__name__.replace("_", " ")


def measure(fault: Callable[[Place], str]) -> dict[str, Any]:
    """Inject one fault in a separate folder. An unexpected exception breaks the promise too, and keeps the earlier rows."""
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
        try:
            seen, verdict = fault(Place(Path(folder))).replace(folder, "..."), "held"
        except Exception as error:
            said = str(error) if isinstance(error, (Broken, OutriderError)) else f"{type(error).__name__}: {error}"
            seen, verdict = said.replace(folder, "..."), "BROKEN"
    return {
        "fault": name_of(fault),
        "promise": " ".join((fault.__doc__ or "").split()),
        "seen": " ".join(seen.split()),
        "verdict": verdict,
    }


PAGE = """# Faults below Outrider

The effect of each fault on a command or a server: what is promised and what was observed. Generated by
`python bench/faults.py --out results/faults.json --page docs/faults.md`.

| fault | promise | verdict | seen |
|---|---|---|---|
"""
COLUMNS = ("fault", "promise", "verdict", "seen")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="run only faults whose name begins with this")
    parser.add_argument("--page", type=Path, help="write the table to this Markdown file")
    args = parsed(parser)
    chosen = [fault for fault in FAULTS if name_of(fault).startswith(args.only)]
    if not chosen:
        raise SystemExit(f"error: no fault begins with {args.only!r}")
    if args.page is not None and args.only:
        raise SystemExit("error: --page writes the table of all faults: give it without --only")
    if sys.platform != "linux" or os.geteuid() != 0:
        raise SystemExit("error: mounts and memory groups need Linux and root")
    needing = ", ".join(name_of(fault) for fault, file in NEED_GROUPS.items() if fault in chosen and not file.exists())
    if needing:
        raise SystemExit(f"error: {needing}: expected control groups of version 1 in {GROUPS}: choose others with --only")
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000) != 0:  # private mount namespace
        raise SystemExit(f"error: cannot create a mount namespace: {os.strerror(ctypes.get_errno())}")
    call("mount", "--make-rprivate", "/")
    rows = []
    for fault in chosen:
        row = measure(fault)
        print(f"{row['verdict']} {row['fault']}: {row['seen']}", file=sys.stderr, flush=True)
        rows.append(row)
    if args.page is not None:
        lines = ("| " + " | ".join(row[name].replace("|", "/") for name in COLUMNS) + " |" for row in rows)
        args.page.write_text(PAGE + "\n".join(lines) + "\n")
    holds = all(row["verdict"] == "held" for row in rows)
    return finish({"schema": "outrider-faults/1", **origin(), "holds": holds, "faults": rows}, args.out)


if __name__ == "__main__":
    sys.exit(main())

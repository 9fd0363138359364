"""Injects faults below Outrider, and checks what each command says and keeps. Linux, as root: mounts and memory groups.

    python bench/faults.py --out results/faults.json --page docs/faults.md
    python bench/faults.py --only disk            # the faults whose name begins so

The commands are those of a user, in processes of their own, on the embedded family. A fault holds if the command ends (or, a
server, goes on) as docs/faults.md promises: an exit code of the documented ones, one line, no traceback, and nothing already
made is lost. Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from outcome import check_out, told

import outrider
from outrider.bench.provenance import origin

PROMPT = "def add(a, b):"
GENERATE = ("generate", "-k", "4", "--max-tokens", "24", "--temperature", "0", PROMPT)
TRAIN = ("train", "medusa", "--heads", "2", "--epochs", "0.2", "--batch-tokens", "512", "--seq-len", "64")
LIMIT = 300.0  # seconds that a command may take under a fault
NUM_SIGNALS = 12  # per command, at moments spread over the time that it takes

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
// Real time jumps by a day, forth and back, every half second of monotonic time. Monotonic time is left as it is.
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


class Broken(Exception):
    """A promise that was not kept."""


def expect(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The last line that it wrote to standard error."""
        lines = [line for line in self.err.replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def expect_error(self, *codes: int) -> str:
        """An error in one line, with one of these exit codes. Returns the line."""
        expect(self.code in codes, f"exit code {self.code}, expected {codes}: {self.err[-600:]}")
        expect("Traceback" not in self.err, f"a traceback: {self.err[-600:]}")
        expect("rror" in self.err or self.code == 130, f"no word: {self.err[-600:]}")
        return f"exit {self.code}: {self.said}"

    def expect_text(self, wanted: str) -> str:
        """The text of a run without the fault."""
        expect(self.code == 0, f"exit code {self.code}: {self.err[-600:]}")
        expect("Traceback" not in self.err, f"a traceback: {self.err[-600:]}")
        expect(self.out == wanted, f"other text: {self.out!r}")
        return "the same text"


class Place:
    """A folder to work in, and commands with and without a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wanted: str | None = None

    def start(self, *words: object, under: Callable[[], None] | None = None, **environment: object) -> subprocess.Popen[str]:
        """An Outrider command; ``under`` runs in its process first."""
        return subprocess.Popen(
            [sys.executable, "-m", "outrider", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(_begin, under),
            env={**os.environ, "COLUMNS": "300", **{name: str(value) for name, value in environment.items()}},
        )

    def run(self, *words: object, under: Callable[[], None] | None = None, **environment: object) -> Ended:
        """The same, to its end."""
        return ended(self.start(*words, under=under, **environment))

    def wanted(self) -> str:
        """What ``GENERATE`` writes without a fault."""
        if self._wanted is None:
            self._wanted = self.run(*GENERATE).out
            expect(self._wanted.strip(), "no text without a fault")
        return self._wanted

    def text(self) -> Path:
        """A text to train on."""
        path = self.folder / "text.txt"
        path.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(800)))
        return path

    @contextlib.contextmanager
    def disk(self, size: str) -> Iterator[Path]:
        """A disk of this size."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        folder.chmod(0o700)
        call("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", folder)
        try:
            yield folder
        finally:
            call("umount", "-l", folder)

    @contextlib.contextmanager
    def mounted_image(self) -> Iterator[tuple[Path, Path]]:
        """A disk in a file, with the embedded target's folder on it: the file, and where it is mounted."""
        image, mounted = self.folder / "image", self.folder / "mounted"
        mounted.mkdir()
        call("truncate", "-s", "96M", image)
        call("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", image)
        call("mount", "-o", "loop", image, mounted)
        try:
            copied_target(mounted / "target")
            yield image, mounted
        finally:
            call("umount", "-l", mounted)

    @contextlib.contextmanager
    def serving(self, *words: object, **environment: object) -> Iterator[Server]:
        """A server that is ready."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        process = self.start("serve", "--port", port, *words, under=None, **environment)
        lines: list[str] = []
        assert process.stderr is not None
        threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True).start()
        server = Server(process, f"http://127.0.0.1:{port}", lines)
        try:
            until(lambda: process.poll() is not None or server.is_ready(), "the server is ready")
            expect(process.poll() is None, f"the server ended: {''.join(lines)[-600:]}")
            yield server
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    log: list[str]

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        return False

    def ask(self, prompt: str = PROMPT, **more: Any) -> tuple[int, str]:
        """A completion: the answer's status and its text or error."""
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        found = answer.json()
        return answer.status_code, found["choices"][0]["text"] if answer.is_success else found["error"]["message"]

    def expect_text(self, wanted: str) -> None:
        status, text = self.ask()
        expect(status == 200 and text.strip() == wanted.strip(), f"{status}: {text!r}, expected {wanted!r}")


def _begin(under: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if under is not None:
        under()


def ended(process: subprocess.Popen[str]) -> Ended:
    """What a process wrote until its end, which must come in time."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise Broken(f"it had not ended after {LIMIT:.0f} s: {err[-600:]}") from None
    return Ended(process.returncode, out, err)


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + LIMIT
    while not holds():
        expect(time.monotonic() < end, f"not within {LIMIT:.0f} s: {what}")
        time.sleep(0.02)


def call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def full(folder: Path) -> None:
    """Fill a disk."""
    with contextlib.suppress(OSError), (folder / "filling").open("wb", 0) as file:
        while True:
            file.write(bytes(1 << 12))


def copied_target(to: Path) -> Path:
    """The embedded target's folder, copied."""
    return Path(shutil.copytree(Path(outrider.__file__).parent / "family" / "target", to))


# Faults: functions of a Place that return what was seen. Their docstrings are the promises.


def disk_full_cache(place: Place) -> str:
    """The text as without it, and one warning."""
    with place.disk("64k") as folder:
        full(folder)
        done = place.run(*GENERATE, "--compile", "never", OUTRIDER_CACHE=folder)
        expect(done.err.count("cache folder") == 1, f"not one warning: {done.err[-600:]}")
        return done.expect_text(place.wanted()) + ", one warning"


def disk_read_only_cache(place: Place) -> str:
    """The text as without it, and one warning."""
    with place.disk("1m") as folder:
        call("mount", "-o", "remount,ro", folder)
        done = place.run(*GENERATE, "--compile", "never", OUTRIDER_CACHE=folder)
        expect(done.err.count("cache folder") == 1, f"not one warning: {done.err[-600:]}")
        return done.expect_text(place.wanted()) + ", one warning"


def disk_full_standard_output(place: Place) -> str:
    """An error in one line, exit code 1."""
    process = subprocess.run(
        f"{sys.executable} -m outrider generate -k 4 --json --max-tokens 8 hello > /dev/full",
        shell=True, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    return Ended(process.returncode, "", process.stderr).expect_error(1)


def disk_full_training(place: Place) -> str:
    """An error in one line, exit code 1; with space the same command goes on from its checkpoint and ends."""
    with place.disk("24m") as folder:
        words = (*TRAIN, "--text", place.text(), "--out", folder / "head")
        first = place.run(*words).expect_error(1)
        expect(not (folder / "head" / "config.json").exists(), "half a head was left")
        call("mount", "-o", "remount,size=2g", folder)
        again = place.run(*words)
        expect(again.code == 0, f"it does not go on: {again.err[-600:]}")
        return f"{first}; then it goes on"


def disk_full_export(place: Place) -> str:
    """An error in one line, exit code 1, and no half of a folder that looks whole."""
    with place.disk("64k") as folder:
        full(folder)
        target = copied_target(place.folder / "target")
        words = ("export", "--to", "vllm", "--target", target, "--method", "ngram", "--out", folder / "made")
        said = place.run(*words).expect_error(1, 2)
        expect(not (folder / "made" / "run.sh").exists(), "half an export was left")
        return said


def disk_read_only_output(place: Place) -> str:
    """An error in one line, exit code 2 or 1, before anything is loaded."""
    with place.disk("1m") as folder:
        call("mount", "-o", "remount,ro", folder)
        started = time.monotonic()
        said = place.run("bench", "--out", folder / "out.json").expect_error(1, 2)
        expect(time.monotonic() - started < 60, "the error came late")
        return said


def weights_cut_short(place: Place) -> str:
    """An error in one line, exit code 2."""
    target = copied_target(place.folder / "short")
    weights = next(target.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    return place.run(*GENERATE, "--target", target).expect_error(2)


def weights_that_cannot_be_read(place: Place) -> str:
    """An error in one line, exit code 2."""
    with place.mounted_image() as (image, mounted):
        target = mounted / "target"
        call("umount", mounted)
        call("mount", "-o", "loop,ro", image, mounted)  # nothing of it is in the page cache now
        for name in ("config.json", *(file.name for file in target.glob("*.safetensors"))):
            with (target / name).open("rb") as file:
                file.read(4096)
        os.truncate(image, 12 << 20)  # reads behind it fail, as on a disk that breaks
        return place.run(*GENERATE, "--target", target).expect_error(2)


def weights_read_slowly(place: Place) -> str:
    """The text as without it."""
    throttle = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")
    words = ("generate", "--max-tokens", "24", "--temperature", "0")
    wanted = place.run(*words, "-k", "0", PROMPT).out
    with place.mounted_image() as (_, mounted):
        found = subprocess.run(["findmnt", "-no", "MAJ:MIN", mounted], capture_output=True, text=True, check=True)
        device = found.stdout.strip()
        call("sync")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        throttle.write_text(f"{device} 1000000")
        try:
            started = time.monotonic()
            done = place.run(*words, "--method", "ngram", "--target", mounted / "target", PROMPT)
            return f"{done.expect_text(wanted)}, after {time.monotonic() - started:.0f} s"
        finally:
            throttle.write_text(f"{device} 0")


def memory_at_load(place: Place) -> str:
    """An error in one line, exit code 1 or 2."""
    target = copied_target(place.folder / "large")
    grow(next(target.glob("*.safetensors")), 6 << 30)
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (4 << 30,) * 2)
    return place.run(*GENERATE, "--target", target, under=limit).expect_error(1, 2)


def memory_group_at_load(place: Place) -> str:
    """Refused in one line before the weights are loaded, exit code 2: the group's limit is less than the weights take."""
    group = Path("/sys/fs/cgroup/memory") / f"outrider-{os.getpid()}"
    group.mkdir()
    target = copied_target(place.folder / "large")
    grow(next(target.glob("*.safetensors")), 900 << 20)
    try:
        (group / "memory.limit_in_bytes").write_text(str(800 << 20))

        def join() -> None:
            (group / "tasks").write_text("0")

        return place.run(*GENERATE, "--target", target, under=join).expect_error(2)
    finally:
        until(lambda: not (group / "tasks").read_text().strip(), "the group is empty")
        group.rmdir()


def grow(weights: Path, size: int) -> None:
    """Add a tensor of this many bytes, a hole in the file, to a safetensors file."""
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
    """A request for which there is no memory is answered with an error; the server goes on."""
    with place.serving("--compile", "never", "--max-batch", "32") as server:
        wanted = server.ask()[1]
        used = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        limit(server.process.pid, used + (4 << 20))
        answers = [server.ask("word " * 300, n=32, max_tokens=200, temperature=1.0) for _ in range(2)]
        limit(server.process.pid, resource.RLIM_INFINITY)
        server.expect_text(wanted)
        statuses = [status for status, _ in answers]
        expect(all(status in (200, 500, 503) for status in statuses), str(answers))
        expect(500 in statuses or 503 in statuses, f"memory did not run out: {statuses}")
        said = next(text for status, text in answers if status >= 500)
        expect("\n" not in said, said)
        return f"{statuses}: {said}; then the same text"


def limit(pid: int, size: int) -> None:
    """Set the limit of a process's address space."""
    resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def worker_killed(place: Place) -> str:
    """Every answer is right; workers are replaced."""
    with place.serving("--compile", "never") as server:
        wanted = server.ask()[1]
        for _ in range(5):
            for child in children(server.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            server.expect_text(wanted)
        return "5 of 5 answers right"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def clock_jumps(place: Place) -> str:
    """The text as without it; no time limit strikes, and no time is negative."""
    source, library = place.folder / "clock.c", place.folder / "clock.so"
    source.write_text(CLOCK)
    call("cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl")
    done = place.run(*GENERATE, "--json", LD_PRELOAD=library)
    expect(done.code == 0, done.err[-600:])
    found = json.loads(done.out)
    expect(found["text"].strip() == place.wanted().removeprefix(PROMPT).strip(), f"other text: {found['text']!r}")
    expect(all(not isinstance(value, (int, float)) or value >= 0 for value in found.values()), str(found))
    with place.serving("--compile", "never", "--request-timeout", "30", LD_PRELOAD=library) as server:
        answers = [server.ask(max_tokens=64) for _ in range(8)]
        expect(len(set(answers)) == 1 and answers[0][0] == 200, str(answers))
        expect(server.is_ready(), "not ready")
    return "the same text; 8 of 8 answers of a server"


def signal_while_generating(place: Place) -> str:
    """Exit code 130 and one word, in whichever phase: start, load, compile, prefill or decoding."""
    return swept(place, ("generate", "-k", "4", "--max-tokens", "900", "--ignore-eos", PROMPT), "tok/s")


def signal_while_exporting(place: Place) -> str:
    """Exit code 130 and one word; an export is whole or not there."""
    folder = place.folder / "exported"

    def whole() -> None:
        files = {path.name for path in folder.glob("*")} if folder.exists() else set()
        expect(not files or "run.sh" in files, f"a part: {files}")

    words = ("export", "--to", "vllm", "--target", copied_target(place.folder / "target"), "--method", "ngram", "--out", folder)
    return swept(place, words, "own-code", whole)


def signal_while_training(place: Place) -> str:
    """Exit code 130 and one word; the same command goes on from its checkpoint, and the head is that of an unbroken run."""
    words = (*TRAIN, "--text", place.text(), "--out")
    unbroken = place.run(*words, place.folder / "unbroken")
    expect(unbroken.code == 0, unbroken.err[-600:])
    said = swept(place, (*words, place.folder / "broken"), "--method medusa")
    last = place.run(*words, place.folder / "broken")
    expect(last.code == 0, last.err[-600:])
    heads = [next((place.folder / name).glob("*.safetensors")).read_bytes() for name in ("unbroken", "broken")]
    expect(heads[0] == heads[1], "another head than that of an unbroken run")
    return f"{said}; then the head of an unbroken run"


def swept(place: Place, words: tuple[object, ...], last_words: str, check: Callable[[], None] = lambda: None) -> str:
    """Interrupt a command at moments all over the time that it takes. ``last_words``: what it writes when its work is done."""
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
        # Python itself ends by SIGINT where that came inside exec() of a text; a shell calls both 130.
        ends = (0, -signal.SIGTERM, -signal.SIGINT) if is_done else (130, -signal.SIGINT)
        expect(done.code in ends, f"exit code {done.code} after signal {index}: {done.err[-600:]}")
        expect(is_done or "interrupted" in done.err, f"no word after signal {index}: {done.err[-300:]}")
        check()
    return f"{were_done.count(False)} times exit 130, {were_done.count(True)} times the end came first"


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


def name_of(fault: Callable[[Place], str]) -> str:
    return fault.__name__.replace("_", " ")


def measure(fault: Callable[[Place], str]) -> dict[str, Any]:
    """Inject a fault in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
        try:
            seen, verdict = fault(Place(Path(folder))).replace(folder, "..."), "held"
        except Broken as broken:
            seen, verdict = str(broken).replace(folder, "..."), "BROKEN"
    return {
        "fault": name_of(fault),
        "promise": " ".join((fault.__doc__ or "").split()),
        "seen": " ".join(seen.split()),
        "verdict": verdict,
    }


PAGE = """# Faults below Outrider

What each fault does to a command or a server, and what was seen when it was injected. Written by
`python bench/faults.py --out results/faults.json --page docs/faults.md`.

| fault | promise | verdict | seen |
|---|---|---|---|
"""
COLUMNS = ("fault", "promise", "verdict", "seen")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the faults whose name begins so")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="write the table to this Markdown file")
    args = parser.parse_args()
    check_out(args.out)
    if sys.platform != "linux" or os.geteuid() != 0:
        raise SystemExit("error: mounts and memory groups need Linux and root")
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000) != 0:  # mounts are this process's own
        raise SystemExit(f"error: no mounts of its own: {os.strerror(ctypes.get_errno())}")
    call("mount", "--make-rprivate", "/")
    rows = []
    for fault in FAULTS:
        if name_of(fault).startswith(args.only):
            row = measure(fault)
            print(f"{row['verdict']} {row['fault']}: {row['seen']}", file=sys.stderr, flush=True)
            rows.append(row)
    if args.page is not None:
        lines = ("| " + " | ".join(row[name].replace("|", "/") for name in COLUMNS) + " |" for row in rows)
        args.page.write_text(PAGE + "\n".join(lines) + "\n")
    holds = all(row["verdict"] == "held" for row in rows)
    return told({"schema": "outrider-faults/1", **origin(), "holds": holds, "faults": rows}, args.out)


if __name__ == "__main__":
    sys.exit(main())

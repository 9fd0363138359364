"""The library of C++ operators: built once with the chosen compiler; without a compiler, reference implementations are used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import running

from outrider import disk_cache, native
from outrider.errors import OutriderError, first_line
from outrider.native import build


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Write a program that replaces the compiler: it records its calls and writes "whole" as its output."""
    program, calls = tmp_path / "cc", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -o ]; do shift; done\nprintf whole > "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return calls


def built() -> Path:
    command = build.find_compiler()
    assert command is not None
    return build.cached(command) or build.library(command)


def test_without_a_compiler_the_reference_implementations_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert native._build_and_load.__wrapped__() is False
    assert "install g++" in caplog.text


def test_without_a_compiler_torch_uses_the_cores_of_the_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """``load`` returned before it read the control group's limit."""
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(native, "num_cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert native._build_and_load.__wrapped__() is False
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_on_windows_the_advice_is_not_to_install_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert native._build_and_load.__wrapped__() is False
    assert "cannot be built on Windows" in caplog.text and "g++" not in caplog.text


def test_a_compiler_that_fails_is_a_warning_not_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    monkeypatch.setenv("CXX", "false")
    assert native._build_and_load.__wrapped__() is False
    assert "cannot be built or loaded" in caplog.text
    assert not list(cache.rglob("*.so"))


def test_every_source_is_compiled_and_linked(calls: Path) -> None:
    built()
    *compiled, linked = calls.read_text().splitlines()
    sources = sorted(Path(line.split(" -c ")[1].split()[0]) for line in compiled)
    assert sources == sorted(build.FOLDER.glob("*.cpp"))
    assert all(f"{source.stem}.o" in linked for source in sources)


def test_a_cached_library_is_not_built_again(calls: Path) -> None:
    file = built()
    once = len(calls.read_text().splitlines())
    assert file.read_text() == "whole" and built() == file
    assert len(calls.read_text().splitlines()) == once


def test_a_library_that_does_not_load_is_a_warning(calls: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert native._build_and_load.__wrapped__() is False
    assert "cannot be built or loaded" in caplog.text


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_cached_library_that_does_not_load_is_built_again(
    is_writable: bool, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been built with a newer libc. What is built is kept outside of a cache that cannot be written."""
    file, unlink = built(), Path.unlink
    once, loaded = len(calls.read_text().splitlines()), []

    def remove(path: Path, missing_ok: bool = False) -> None:
        if path == file and not is_writable:
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(path, missing_ok)

    def refuse(*parts: str) -> Path:
        raise OutriderError("the cache folder cannot be used")

    monkeypatch.setattr(Path, "unlink", remove)
    monkeypatch.setattr(disk_cache, "_temporary_root", disk_cache.cache(disk_cache._temporary_root.__wrapped__))
    if not is_writable:
        monkeypatch.setattr(disk_cache, "lasting_dir", refuse)

    def load(path: Path) -> None:
        loaded.append(path)
        if len(loaded) == 1:
            raise OSError("version `GLIBC_2.38' not found")

    monkeypatch.setattr(torch.ops, "load_library", load)
    assert native._build_and_load.__wrapped__() is True
    assert len(calls.read_text().splitlines()) == 2 * once
    assert loaded[0] == file and loaded[1].read_text() == "whole" and (loaded[1] == file) == is_writable


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="mounts are not described here")
def test_a_cache_on_a_mount_with_noexec_is_named_and_nothing_is_built_again(
    calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built()
    once = calls.read_text()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert native._build_and_load.__wrapped__() is False
    assert "set OUTRIDER_CACHE to a folder on a mount without it" in caplog.text
    assert calls.read_text() == once


def test_another_libc_has_another_library(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built()
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert built() != first


def test_another_abi_has_another_library(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built()
    monkeypatch.setattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", not torch._C._GLIBCXX_USE_CXX11_ABI)
    assert built() != first


def test_another_cpu_has_another_library(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {built()}
    for name in ("POWER9", "POWER10"):  # no line of flags
        monkeypatch.setattr(build, "kernel_lines", lambda path, name=name: ["processor\t: 0", f"cpu\t\t: {name}"])
        found.add(built())
    monkeypatch.setattr(sys, "platform", "darwin")  # no /proc
    for name in ("Apple M1", "Apple M4"):
        monkeypatch.setattr(subprocess, "check_output", lambda *args, name=name, **options: f"{name}\n")
        found.add(built())
    assert len(found) == 5


def test_without_the_name_of_the_cpu_its_kind_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox of macOS may refuse to run other programs."""

    def refuse(*args, **options) -> str:
        raise PermissionError

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(build, "kernel_lines", lambda path: [])  # no /proc
    monkeypatch.setattr(build.platform, "processor", lambda: "arm")
    for failure in (refuse, lambda *args, **options: subprocess.run(["false"], check=True)):
        monkeypatch.setattr(subprocess, "check_output", failure)
        assert build.cpu_flags() == "arm"


def test_cxx_may_contain_arguments(calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", f"'{os.environ['CXX']}' -pipe '-DWORDS=two words'")
    built()
    assert calls.read_text().startswith("-pipe -DWORDS=two words -std=")
    monkeypatch.setenv("CXX", "g++ '-pipe")
    assert native._build_and_load.__wrapped__() is False
    assert 'CXX="g++ \'-pipe" is not a command line' in caplog.text


def test_a_failing_compilation_unit_stops_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "num_cores", lambda: len(build.UNITS))
    script = 'case "$*" in *attention.cpp*) echo "no such thing" >&2; exit 1;; esac; exec sleep 60'
    started = time.monotonic()
    with pytest.raises(subprocess.SubprocessError, match="no such thing"):
        build.library(["/bin/sh", "-c", script, "cc"])
    assert time.monotonic() - started < 30


def test_as_many_compilers_run_as_this_process_has_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container with one core of a machine with 64 has memory for one compiler."""
    monkeypatch.setattr(build.os, "cpu_count", lambda: len(build.UNITS))
    monkeypatch.setattr(build, "num_cores", lambda: 1)
    at_once, started = [], []
    start = subprocess.Popen.__init__

    def counted(self, *args, **options) -> None:
        at_once.append(sum(each.returncode is None for each in started))
        started.append(self)
        start(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", counted)
    build._run([["true"]] * 3)
    assert at_once == [0, 0, 0]


def test_a_compiler_that_fails_without_a_message() -> None:
    with pytest.raises(subprocess.SubprocessError, match="false ended with exit code 1"):
        build._run([["false"]])


@pytest.mark.parametrize(
    "messages, cause",
    [
        ("In file included from a.h:1,\n   from a.cpp:2:\na.h:2:5: error: no x\na.h:3:5: error: no y", "a.h:2:5: error: no x"),
        ("a.cpp:1:10: fatal error: no b.h\ncompilation terminated.", "a.cpp:1:10: fatal error: no b.h"),
        (
            "a.h:2:5: warning: no x\ng++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
            "g++: fatal error: Killed signal terminated program cc1plus",
        ),
        ("ld: cannot find -lc10\ncollect2: error: ld returned 1 exit status", "ld: cannot find -lc10"),
    ],
)
def test_the_cause_of_a_failed_build_is_its_first_error(messages: str, cause: str) -> None:
    with pytest.raises(subprocess.SubprocessError) as failure:
        build._run([["/bin/sh", "-c", 'echo "$1" >&2; exit 1', "cc", messages]])
    assert first_line(failure.value) == cause


def test_compilers_report_in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is searched for in their messages."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(subprocess.SubprocessError, match=r"^C$"):
        build._run([["/bin/sh", "-c", 'echo "$LC_ALL" >&2; exit 1']])


def test_importing_the_package_and_the_loader_imports_no_torch() -> None:
    program = "import sys, outrider, outrider.native, outrider.native.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_sigterm_during_compilation_ends_the_compilers_too(tmp_path: Path) -> None:
    """Python joins its threads before it exits: none may wait for a compiler."""
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 60\n")
    compiler.chmod(0o755)
    program = (
        "from outrider.cli import app; from outrider.native import build\n"
        f"app.build_app = lambda: lambda *_, **__: build.library(['{compiler}'])\n"
        "app.run()"
    )
    environment = os.environ | {"OUTRIDER_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)  # an interrupt while a process starts would lose it
    started = time.monotonic()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.decode().strip().endswith("interrupted"), errors
    assert time.monotonic() - started < 30
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert pids and not any(map(running, pids))
    assert not list(tmp_path.glob("outrider-*"))

"""Code in the cache folder: only private files are loaded; a missing folder is not an error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider import disk_cache
from outrider.disk_cache import cache_dir, find, lasting_dir, store, write
from outrider.types import OutriderError

is_root = hasattr(os, "getuid") and os.getuid() == 0
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX file permissions")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, with no record of earlier warnings."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_temporary_root", disk_cache.cache(disk_cache._temporary_root.__wrapped__))
    return tmp_path / "cache"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    file = tmp_path / "built"
    file.write_bytes(b"code" * 1000)
    return file


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_folders_are_private_and_files_are_named_by_their_key(cache: Path, built: Path) -> None:
    before = os.umask(0)
    try:
        path = store(built, "kernels", "cpu-1", ".so")
    finally:
        os.umask(before)
    assert path == cache / "kernels" / "cpu-1.so" and path.read_bytes() == built.read_bytes()
    assert [folder.stat().st_mode & 0o777 for folder in (cache, cache / "kernels")] == [0o700, 0o700]
    assert path.stat().st_mode & 0o077 == 0
    assert find("kernels", "cpu-1", ".so") == path
    assert find("kernels", "cpu-2", ".so") is None and find("passes", "cpu-1", ".so") is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary file is left


def test_storing_deletes_files_of_the_same_kind_that_were_not_used_for_long(built: Path) -> None:
    kernels = [store(built, "kernels", f"cpu-{index}", ".so") for index in range(3)]
    passes = store(built, "passes", "a", ".pt2")
    long_ago = time.time() - disk_cache.UNUSED_SECONDS - 60
    for path in (*kernels[:2], passes):
        os.utime(path, (long_ago, long_ago))
    assert find("kernels", "cpu-1", ".so") == kernels[1]  # counts as use
    write("kernels", "cpu-3", ".so", lambda file: None)  # as does ``store``
    assert [path.exists() for path in (*kernels, passes)] == [False, True, True, True]


def test_partial_files_of_killed_processes_are_removed_after_a_day(cache: Path, built: Path) -> None:
    parts = [lasting_dir("weights") / f"model.packed.{name}.part" for name in ("old", "new")]
    for part in parts:
        part.touch()
    a_day_ago = time.time() - 24 * 3600 - 60
    os.utime(parts[0], (a_day_ago, a_day_ago))
    store(built, "weights", "other", ".packed")
    assert [part.exists() for part in parts] == [False, True]


WRITABLE = [("kernels", 0o777), ("kernels", 0o770), ("kernels", 0o1777), (".", 0o777), (".", 0o770)]


@pytest.mark.parametrize(("which", "mode"), WRITABLE)
def test_a_folder_writable_by_others_is_not_used(
    which: str, mode: int, cache: Path, built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted = store(built, "kernels", "cpu-1", ".so")
    (cache / which).chmod(mode)
    assert find("kernels", "cpu-1", ".so") is None and planted.exists()
    instead = store(built, "kernels", "cpu-1", ".so")
    assert cache not in instead.parents and find("kernels", "cpu-1", ".so") == instead
    assert len(warnings(caplog)) == 1 and f"chmod go-w {(cache / which).resolve()}" in caplog.text
    with pytest.raises(OutriderError, match="other users can write to"):
        lasting_dir("kernels")


def test_a_link_to_an_unsafe_folder_is_not_used(cache: Path, tmp_path: Path, built: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open" / "real").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "open" / "real")
    assert cache in store(built, "kernels", "cpu-1", ".so").parents
    (tmp_path / "open").chmod(0o777)  # the target of the link could be exchanged
    assert find("kernels", "cpu-1", ".so") is None


def test_links_and_files_writable_by_others_are_not_returned(built: Path, tmp_path: Path) -> None:
    path = store(built, "kernels", "cpu-1", ".so")
    path.chmod(0o666)
    assert find("kernels", "cpu-1", ".so") is None and not path.exists()
    path.symlink_to(built)
    assert find("kernels", "cpu-1", ".so") is None and built.exists()


@pytest.mark.skipif(not is_root, reason="needs root, to change owners")
@pytest.mark.parametrize("which", ["kernels", "kernels/file"])
def test_files_of_another_user_are_not_used(which: str, cache: Path, built: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = store(built, "kernels", "cpu-1", ".so")
    os.chown(path if which.endswith("file") else cache / which, 12345, -1)
    assert find("kernels", "cpu-1", ".so") is None
    assert ("uid 12345" if which == "kernels" else "can be written by other users") in caplog.text


@pytest.mark.parametrize("kind", ["a file", "no folder", "unwritable"])
def test_without_a_cache_folder_a_private_one_is_used_with_one_warning(
    kind: str, cache: Path, tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "a file":
        cache.write_text("")
    elif kind == "no folder":
        monkeypatch.setenv("OUTRIDER_CACHE", "/proc/nowhere")
    else:  # root ignores file modes
        monkeypatch.setattr(disk_cache.tempfile, "TemporaryFile", refusing(OSError(30, "Read-only file system")))
    assert find("kernels", "cpu-1", ".so") is None
    path = store(built, "kernels", "cpu-1", ".so")
    assert find("kernels", "cpu-1", ".so") == path and path.read_bytes() == built.read_bytes()
    exports = cache_dir("exports", "one")
    assert exports.parent.parent == path.parent.parent and exports.stat().st_mode & 0o777 == 0o700
    assert len(warnings(caplog)) == 1 and "OUTRIDER_CACHE" in caplog.text and "\n" not in warnings(caplog)[0]
    with pytest.raises(OutriderError, match="the cache folder cannot be used"):  # no temporary folder for large files
        lasting_dir("inflated")


def refusing(error: OSError) -> object:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def test_a_full_disk_is_not_an_error(
    built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = disk_cache._stored

    def full(source: Path, folder: Path, *name: str) -> Path:
        if cache in folder.parents:
            raise OSError(28, "No space left on device")
        return stored(source, folder, *name)

    monkeypatch.setattr(disk_cache, "_stored", full)
    assert cache not in store(built, "kernels", "cpu-1", ".so").parents
    assert len(warnings(caplog)) == 1 and "No space left" in caplog.text


def test_a_read_only_cache_can_be_read(built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path = store(built, "kernels", "cpu-1", ".so")
    monkeypatch.setattr(disk_cache.tempfile, "TemporaryFile", refusing(OSError(30, "Read-only file system")))
    assert find("kernels", "cpu-1", ".so") == path and not warnings(caplog)


def test_an_interrupted_write_leaves_no_file_that_is_found(built: Path, cache: Path) -> None:
    """The process is killed at one system call after another."""
    program = (
        "import os, sys; from pathlib import Path; from outrider import disk_cache\n"
        "def die(*_, **__): os._exit(9)\n"
        "setattr(os, sys.argv[2], die)\n"
        "disk_cache.store(Path(sys.argv[1]), 'kernels', 'cpu-1', '.so')"
    )
    for call in ("fsync", "replace"):
        assert subprocess.run([sys.executable, "-c", program, str(built), call], check=False).returncode == 9
        assert list((cache / "kernels").iterdir()) and find("kernels", "cpu-1", ".so") is None
    assert find("kernels", "cpu-1", ".so") is None
    assert store(built, "kernels", "cpu-1", ".so").read_bytes() == built.read_bytes()


def test_a_private_folder_is_removed_with_its_process(cache: Path) -> None:
    cache.write_text("")
    program = "from outrider.disk_cache import cache_dir; print(cache_dir('kernels'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() and not Path(done.stdout.strip()).exists()
    assert done.stderr.count("\n") == 1

"""What is no regular file is refused, no link is followed when writing, a killed writer leaves old or new."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import raises

from fleetfit import files
from fleetfit.errors import ConfigError


def test_a_pipe_and_a_device_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a named pipe"), (tmp_path / "link", "a named pipe"),
                       (Path("/dev/zero"), "a device")):  # fmt: skip
        with raises(OSError, what, errno=errno.EINVAL, filename=str(path)):
            files.read_bytes(path)
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path)


def test_a_link_to_a_file_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\n")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert files.read_text(tmp_path / "link") == "a\nb\n"
    assert files.is_file(tmp_path / "link") and not files.is_file(tmp_path / "other")
    (tmp_path / "nowhere").symlink_to(tmp_path / "other")
    with raises(FileNotFoundError, "a symbolic link", filename=str(tmp_path / "nowhere")):
        files.is_file(tmp_path / "nowhere")


def test_a_home_of_nobody_is_a_sentence() -> None:
    with raises(ConfigError, "~nobody-at-all", path="~nobody-at-all/x"):
        files.parse_path("~nobody-at-all/x")
    with raises(ConfigError, path="a\0b"):
        files.parse_path("a\0b")


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "{"])
def test_strange_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - nested too deeply, a number too long, cut off
        files.parse_json(text)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("theirs")
    for name in ("file", ".file.part"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    files.write_text(tmp_path / "file", "ours")
    assert (tmp_path / "file").read_text() == "ours" and not (tmp_path / "file").is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "theirs"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "file"]


def test_nothing_is_added_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("theirs")
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    with raises(OSError, "a symbolic link", errno=errno.EINVAL, filename=str(tmp_path / "file")):
        files.append_line(tmp_path / "file", b"ours")
    os.mkfifo(tmp_path / "pipe")
    with raises(OSError, "a named pipe", errno=errno.EINVAL, filename=str(tmp_path / "pipe")):
        files.append_line(tmp_path / "pipe", b"ours")
    assert (tmp_path / "elsewhere").read_text() == "theirs"


def test_folders_in_between_are_no_links(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "plots").symlink_to(tmp_path / "elsewhere")
    with raises(NotADirectoryError, "a symbolic link", filename=str(tmp_path / "run/plots")):
        files.safe_join(tmp_path / "run", "plots/a.png")
    (tmp_path / "run" / "notes").write_text("")
    with raises(NotADirectoryError, "a file", filename=str(tmp_path / "run/notes")):
        files.safe_join(tmp_path / "run", "notes/a")
    assert files.safe_join(tmp_path / "run", "new/below/a").parent.is_dir()


def test_two_writers_of_one_file_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    texts = [letter * 200_000 for letter in "abcd"]
    threads = [
        threading.Thread(target=lambda t=text: [files.write_text(tmp_path / "file", t) for _ in range(20)])
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_text() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from fleetfit import files\n"
        "place = Path(sys.argv[1])\n"
        "with files.atomic_folder(place / 'folder') as part, files.atomic_write(place / 'file') as file:\n"
        "    (part / 'half').write_text('half'); file.write(b'half'); file.flush(); print('begun', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        with raises(OSError, errno=errno.EBUSY), files.atomic_folder(tmp_path / "folder"):
            pass
        os.kill(process.pid, signal.SIGKILL)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".file.part", ".folder.part"]
    files.write_text(tmp_path / "file", "whole")
    with files.atomic_folder(tmp_path / "folder") as part:
        assert not list(part.iterdir())
        part.rename(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_named_file_may_be_a_pipe_or_a_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append((tmp_path / "pipe").read_text()))
    reader.start()
    files.write_user_file(tmp_path / "pipe", "text")
    reader.join()
    assert texts == ["text"]
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write_user_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_a_write_that_fails_leaves_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with raises(OSError, errno=errno.ENOSPC):
        files.write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_file_is_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with raises(ConfigError, "a named pipe", path=tmp_path / "pipe"):  # it may have no writer
        files.parse_input_file(tmp_path / "pipe")


HOLDS = """
import sys
from pathlib import Path
from fleetfit import files
with files.hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="is_held has no answer there")
def test_a_lock_needs_no_permission_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        path.chmod(0o444)
        tmp_path.chmod(0o555)
        assert files.is_held(path)
        tmp_path.chmod(0o755)
        path.chmod(0o644)
        with raises(OSError, errno=errno.EBUSY), files.hold_lock(path):
            pass
        holder.kill()
    assert not files.is_held(path)
    with files.hold_lock(path):
        assert files.is_held(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with raises(OSError, "a symbolic link", errno=errno.EINVAL), files.hold_lock(path):
        pass
    assert not (tmp_path / "elsewhere").exists()

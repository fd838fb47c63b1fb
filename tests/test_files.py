"""Whatever interrupts a write, the old file or folder is whole and nothing half-written is left beside it."""

import os
import resource
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import save_file

from grpolab import files
from grpolab.files import append, atomic_folder, atomic_write, data_path, locked, remove_folder, restore_folder


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "new folder" / "a.txt"
    atomic_write(target, "old")
    assert atomic_write(target, b"new \xe2\x80\xa6") == target
    assert target.read_text() == "new …" and os.listdir(target.parent) == ["a.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch, call):
    target = atomic_write(tmp_path / "a.txt", "old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(target, "new")
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_a_write_for_which_there_is_no_room_names_its_path_and_changes_nothing(tmp_path):
    """A limit of what a process may write, as of a full disk: a line that is added, a file, tensors in a folder."""
    target, tensors = atomic_write(tmp_path / "a.txt", "old\n"), {"w": torch.zeros(100_000)}
    writes = {"a.txt": lambda: append(target, "x" * 3000), "b.txt": lambda: atomic_write(tmp_path / "b.txt", "x" * 3000),
              "policy": lambda: save_file(tensors, folder / "model.safetensors")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writes.items():
        with pytest.raises(OSError, match=name) as raised, ExitStack() as stack:
            if name == "policy":
                folder = stack.enter_context(atomic_folder(tmp_path / "policy"))
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
                write()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert files.is_full(raised.value), name
    assert os.listdir(tmp_path) == ["a.txt"] and target.read_text() == "old\n"
    append(target, "new …\n")
    assert target.read_text() == "old\nnew …\n"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_takes_the_old_ones_place_at_once_or_not_at_all(tmp_path, error):
    """And what lies in it may be read by others: safetensors writes files that only their owner may read."""
    target = tmp_path / "policy"
    for content in ("old", "new"):
        with atomic_folder(target) as folder:
            os.close(os.open(folder / content, os.O_CREAT | os.O_WRONLY, 0o600))
            assert not (target / content).exists()
    with pytest.raises(error), atomic_folder(target) as folder:
        (folder / "half").write_text("half")
        raise error("in the middle")
    assert os.listdir(target) == ["new"] and os.listdir(tmp_path) == ["policy"]
    assert (target / "new").stat().st_mode & 0o777 == 0o644


def test_a_folder_behind_a_symbolic_link_is_replaced_where_it_lies(tmp_path):
    target, link = tmp_path / "big", tmp_path / "policy"
    target.mkdir()
    link.symlink_to(target)
    for content in ("old", "new"):
        with atomic_folder(link) as folder:
            (folder / content).touch()
    assert link.is_symlink() and os.listdir(target) == ["new"] and sorted(os.listdir(tmp_path)) == ["big", "policy"]


def test_a_folder_whose_place_cannot_be_taken_is_still_there(tmp_path, monkeypatch):
    target, rename = tmp_path / "policy", os.rename
    with atomic_folder(target) as folder:
        (folder / "old").touch()

    def interrupted(source, to):
        if to == target and "gone" not in str(source):
            raise KeyboardInterrupt
        rename(source, to)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(target):
        pass
    assert os.listdir(target) == ["old"] and os.listdir(tmp_path) == ["policy"]


def test_a_write_through_a_symbolic_link_keeps_it_and_the_permissions(tmp_path):
    target, link = tmp_path / "real.csv", tmp_path / "latest.csv"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    assert atomic_write(link, "new") == link
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o600


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="a file is there"), atomic_folder(tmp_path / "notes"):
        pass
    assert (tmp_path / "notes").read_text() == "mine" and os.listdir(tmp_path) == ["notes"]


def test_a_kill_between_two_renames_costs_no_folder(tmp_path):
    (gone := tmp_path / ".policy.gone.partial").mkdir()
    for _ in range(2):  # the second time it has its name again
        restore_folder(gone)
        assert os.listdir(tmp_path) == ["policy"]
        gone = tmp_path / "policy"
    (tmp_path / ".policy.gone.partial").mkdir()
    restore_folder(tmp_path / ".policy.gone.partial")  # the new one is in its place
    assert sorted(os.listdir(tmp_path)) == [".policy.gone.partial", "policy"]


def test_a_removal_that_a_kill_broke_off_is_not_taken_back(tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    remove_folder(tmp_path / "checkpoint")
    (left,) = tmp_path.iterdir()
    restore_folder(left)
    assert os.listdir(tmp_path) == [".checkpoint.removed.partial"]


def test_two_processes_that_add_lines_lose_none(tmp_path):
    (path := tmp_path / "lines").touch()
    program = ("import sys; from pathlib import Path; from grpolab.files import append\n"
               "for n in range(4000): append(Path(sys.argv[1]), f'{sys.argv[2]} {n} ' + 'x' * 200 + '\\n')")
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert sorted(line[:6].split()[0] for line in path.read_text().splitlines()) == ["a"] * 4000 + ["b"] * 4000


def test_a_missing_shipped_file_is_named():
    assert data_path("tiny", "config.json").exists()
    with pytest.raises(FileNotFoundError, match="no-such-file.*whole copy"):
        data_path("no-such-file")


def test_a_lock_is_of_one_holder_and_free_after_it(tmp_path):
    for _ in range(2):
        with locked(tmp_path / ".process"):
            with pytest.raises(BlockingIOError, match=str(os.getpid())), locked(tmp_path / ".process"):
                pass


def test_a_folder_loses_its_name_before_its_files(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("1")

    def die(path, **_):
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            remove_folder(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    remove_folder(tmp_path / "a")  # with what the kill left still there
    assert not list(tmp_path.iterdir())

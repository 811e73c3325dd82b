"""Whose word a file is: the user's own and root's, and nobody else's."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compress.errors import ServerError
from compress.vetting import ours
from compress.vetting.ours import check_ours

STRANGER = 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No container, wherever these run."""
    monkeypatch.setattr(ours, "IN_CONTAINER", ())
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "gateway.toml"
    path.write_text("port = 1\n")
    path.chmod(0o644)
    return path


def in_container(monkeypatch: pytest.MonkeyPatch, *mounts: Path) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(ours, "_mounts", lambda: frozenset(map(str, mounts)))


def test_a_file_of_ones_own_in_a_folder_of_ones_own_is_trusted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_ours(file)
    check_ours(file, alone=True)
    monkeypatch.chdir(file.parent)
    check_ours(Path(file.name), alone=True)
    check_ours(Path("../folder/./gateway.toml"))


@pytest.mark.parametrize("mode", [0o646, 0o666, 0o622])
def test_a_file_that_all_may_write_is_not(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ServerError, match="other users may write the file") as caught:
        check_ours(file)
    assert caught.value.mend == f"chmod go-w {file}"


@pytest.mark.parametrize("which", ["parent", "above"])
def test_nor_is_one_in_or_below_a_folder_where_all_could_exchange_it(file: Path, which: str) -> None:
    folder = file.parent if which == "parent" else file.parent.parent
    folder.chmod(0o777)
    with pytest.raises(ServerError, match="other users may write to the folder") as caught:
        check_ours(file)
    assert str(folder) in caught.value.why


def test_in_a_sticky_folder_it_is_unless_what_lies_beside_it_counts(file: Path) -> None:
    file.parent.chmod(0o1777)
    check_ours(file)
    with pytest.raises(ServerError, match="other users may write to the folder"):
        check_ours(file, alone=True)
    missing = file.with_name("rollouts.db")
    with pytest.raises(ServerError, match="other users may write to the folder"):
        check_ours(missing, alone=True)
    with pytest.raises(FileNotFoundError):
        check_ours(missing)


def test_another_name_of_a_file_elsewhere_is_not_trusted_where_others_may_make_names(file: Path) -> None:
    file.parent.chmod(0o1777)
    (file.parent / "other.toml").hardlink_to(file)
    with pytest.raises(ServerError, match="another name"):
        check_ours(file)


def test_what_is_no_file_is_not_read(file: Path) -> None:
    fifo = file.with_name("fifo")
    os.mkfifo(fifo, 0o600)
    check_ours(fifo)
    for path, alone in ((fifo, True), (file.parent, False), (Path("/dev/null"), False), (file.parent / "..", False)):
        with pytest.raises(ServerError, match=r"no file|a directory"):
            check_ours(path, alone=alone)


def test_a_pipe_that_the_shell_has_opened_is_trusted() -> None:
    code = "from pathlib import Path; import sys; from compress.vetting.ours import check_ours; check_ours(Path(sys.argv[1]))"
    script = f"{sys.executable} -c '{code}' <(echo) && echo | {sys.executable} -c '{code}' /dev/stdin"
    subprocess.run([shutil.which("bash") or "/bin/bash", "-c", script], check=True, timeout=60)


def test_a_link_is_followed_and_a_circle_of_them_told(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder")
    check_ours(tmp_path / "link" / "gateway.toml")
    (tmp_path / "elsewhere").symlink_to("folder/gateway.toml")
    file.parent.chmod(0o1777)
    check_ours(tmp_path / "elsewhere")
    with pytest.raises(ServerError, match="other users may write to the folder"):  # where it is, not where the link is
        check_ours(tmp_path / "elsewhere", alone=True)
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(ServerError, match="too many links"):
        check_ours(tmp_path / "round")


@as_root
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_belongs_to_another_user_is_not_trusted(file: Path, tmp_path: Path, what: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    named = {"file": file, "folder": file.parent, "link": link}[what]
    os.chown(named, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(ServerError, match=f"{named} belongs to the user {STRANGER}"):
        check_ours(link)


@pytest.mark.parametrize(
    ("name", "gid", "members", "trusted"),
    [
        ("me", 500, [], True),
        ("me", 500, ["me"], True),
        ("me", 500, ["me", "she"], False),
        ("users", 500, [], False),
        ("me", 501, [], False),
        ("root", 0, [], True),
        ("root", 0, ["she"], False),
    ],
    ids=str,
)
def test_a_group_of_ones_own_may_write_and_no_other(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, gid: int, members: list[str], trusted: bool
) -> None:
    file.chmod(0o664)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd(("me", "", os.geteuid(), 500, *"   ")))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "", gid, members)))
    way = ours._Way(file, alone=False)
    assert way._is_private(gid) is trusted


def test_what_kubernetes_mounts_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret: a sticky folder, a link to a folder of the moment, the group's to read; it has no users to name."""
    mount = tmp_path / "secrets"
    (mount / "..2026").mkdir(parents=True)
    mount.chmod(0o3777)
    (mount / "..2026/keys.json").write_text("{}")
    (mount / "..2026/keys.json").chmod(0o440)
    (mount / "..data").symlink_to("..2026")
    (mount / "keys.json").symlink_to("..data/keys.json")
    in_container(monkeypatch, mount)
    check_ours(mount / "keys.json")


def test_a_volume_of_kubernetes_holds_a_state_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emptyDir is all the world's to write, and with fsGroup each file in it the group's after the next mount."""
    file.parent.chmod(0o2777)
    file.chmod(0o660)
    for path in (file, file.with_name("none")):
        in_container(monkeypatch)
        with pytest.raises(ServerError, match="other users may write to the folder"):
            check_ours(path, alone=True)
    in_container(monkeypatch, file.parent)
    check_ours(file, alone=True)
    file.parent.chmod(0o1777)  # a mounted /tmp is for many
    with pytest.raises(ServerError, match="other users may write to the folder"):
        check_ours(file, alone=True)


@as_root
@pytest.mark.parametrize("mounted", ["file", "folder"])
def test_what_a_container_was_given_by_its_user_is_trusted(
    file: Path, monkeypatch: pytest.MonkeyPatch, mounted: str
) -> None:
    os.chown(file, STRANGER, STRANGER)
    os.chown(file.parent, STRANGER, STRANGER)
    path = file
    if mounted == "file":
        os.chown(file.parent, 0, 0)
    in_container(monkeypatch, path if mounted == "file" else path.parent)
    check_ours(path)
    in_container(monkeypatch)
    with pytest.raises(ServerError, match="belongs to"):
        check_ours(path)


def test_where_things_are_mounted_is_read_as_the_kernel_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("1 0 8:1 / / rw - ext4 a rw\n2 1 0:5 / /a\\040b rw - tmpfs b rw\n")
    monkeypatch.setattr(ours, "MOUNTS", table)
    assert ours._mounts() == {"/a b"}

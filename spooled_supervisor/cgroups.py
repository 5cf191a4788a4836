"""Where we are among the control groups (cgroups(7)), and whether a part of them is ours to arrange.

Found in /proc alone, wherever the hierarchies are mounted, and as far as the mounts show them. A part of version 2 is
ours if it was delegated: systemd marks such a directory by an extended attribute (251 and newer; systemd's
CGROUP_DELEGATION document), others give it to our user (cgroups(7), "Delegation"). A user's own systemd (252) gives all
its directories to that user and marks none; in one where we are alone nobody else is disturbed. That root may write
there means nothing: a tree has one writer, and where there is no mark that is somebody else.

In a delegated directory we move to a leaf, as a directory with controllers for others has no processes of its own
(cgroups(7), "no internal processes"). Whoever asks about our cgroup means the whole family, so the leaf is passed over.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from spooled_supervisor.processes import read_file, write_file

LEAF = "supervisor"
"""Below the delegated directory: the supervisor and its fork servers. systemd's DelegateSubgroup= may name it, too."""
MARKS = ("user.delegate", "trusted.delegate")
OF_SYSTEMD = "user.invocation_id"
"""What systemd writes on every unit's directory, delegated or not."""


def memory_cgroup(root: Path = Path("/")) -> list[Path]:
    """The directories of our memory cgroup, innermost first, up to its mount; empty if there is none to see."""
    paths, mounts = _look(root)
    for controllers, path in paths.items():
        if "memory" in controllers.split(","):
            return _directories(root, path, (line for line in mounts if _is_mount(line, "cgroup", "memory")))
    return unified_cgroup(root)


def unified_cgroup(root: Path = Path("/")) -> list[Path]:
    """The same in version 2. Where we are in our own leaf, it begins with the delegated directory above."""
    paths, mounts = _look(root)
    found = _directories(root, paths.get("", "/"), (line for line in mounts if _is_mount(line, "cgroup2")))
    if len(found) > 1 and found[0].name == LEAF and (_is_marked(found[1]) or _was_given_to_us(found[1])):
        return found[1:]
    return found


def delegated(root: Path = Path("/")) -> Path | None:
    """The directory of version 2 below which we may make others; None if there is none, or it is read-only for us."""
    directory = next(iter(unified_cgroup(root)), None)
    if directory is None or not os.access(directory, os.W_OK):
        return None
    members, us = _members(directory), str(os.getpid()).encode()
    is_inside = us in members  # the nearest that a mount shows need not be where we are
    is_alone = members == [us]
    is_ours = (is_inside and _is_marked(directory)) or (is_alone and _was_given_to_us(directory))
    return directory if is_ours else None


def join(directory: str | os.PathLike[str]) -> None:
    """Move this process there; what it starts is born there. Raises OSError.

    The kernel waits for all processors meanwhile: 10 ms and more, in which other changes of cgroups wait, too.
    """
    write_file(os.path.join(directory, "cgroup.procs"), "0")


def _is_marked(directory: Path) -> bool:
    return any(_attribute(directory, mark) == b"1" for mark in MARKS)


def _was_given_to_us(directory: Path) -> bool:
    """To a user that is not root; and not by a systemd that marks its directories, but not this one."""
    user = os.geteuid()
    try:
        owners = {os.stat(directory / name).st_uid for name in ("", "cgroup.procs", "cgroup.subtree_control")}
    except OSError:
        return False
    return user != 0 and owners == {user} and _attribute(directory, OF_SYSTEMD) is None


def _members(directory: Path) -> list[bytes]:
    """Numbers of the processes in it and in our leaf."""
    members: list[bytes] = []
    for place in (directory, directory / LEAF):
        with contextlib.suppress(OSError):  # there is no leaf
            members += read_file(str(place / "cgroup.procs")).split()
    return members


def _attribute(directory: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(directory, name)
    except OSError:  # not there, or a kernel without them (before 5.7)
        return None


# --- files of a cgroup -----------------------------------------------------------------------------------------------


def read_number(path: Path) -> int | None:
    """What stands there alone; None if it is not there, or the word "max"."""
    try:
        return int(_text(path))
    except (OSError, ValueError):
        return None


def read_fields(path: Path) -> dict[str, int]:
    """A file of lines `name number`; empty if it is not there."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in _text(path).splitlines():
            name, _, value = line.partition(" ")
            with contextlib.suppress(ValueError):
                fields[name] = int(value)
    return fields


# --- /proc -----------------------------------------------------------------------------------------------------------


def _look(root: Path) -> tuple[dict[str, str], list[str]]:
    """Our path in each hierarchy, by its controllers (version 2: none); the lines of all mounts."""
    try:
        memberships = _text(root / "proc/self/cgroup").splitlines()
        mounts = _text(root / "proc/self/mountinfo").splitlines()
    except OSError:
        return {}, []
    return dict(line.split(":", 2)[1:] for line in memberships if line.count(":") >= 2), mounts


def _is_mount(line: str, fs_type: str, option: str | None = None) -> bool:
    """mountinfo: `36 35 98:0 /root /mount/point rw,noatime master:1 - type source super,options` (proc(5))."""
    _, _, tail = line.partition(" - ")
    fields = tail.split()
    return len(fields) >= 3 and fields[0] == fs_type and (option is None or option in fields[2].split(","))


def _directories(root: Path, path: str, mounts: Iterable[str]) -> list[Path]:
    for line in mounts:
        mounted, mount_point = (_unescape(field) for field in line.split()[3:5])
        top = root / mount_point.lstrip("/")
        # In a container without a cgroup namespace the mount shows a part of the hierarchy only. A path outside of it
        # ("/..": we were moved in from elsewhere) cannot be followed; the mount's own top is the nearest that we see.
        inside = path.startswith(mounted.rstrip("/") + "/") or path == mounted
        below = [part for part in path[len(mounted) :].split("/") if part] if inside else []
        if ".." in below:
            below = []
        return [top.joinpath(*below[:depth]) for depth in range(len(below), -1, -1)]
    return []


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _text(path: Path) -> str:
    return read_file(str(path)).decode("utf-8", "surrogateescape")

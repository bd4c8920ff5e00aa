"""Holds one emulated host: a process that `hosts.py` starts in namespaces of its own (`unshare --net --mount --uts`).

It names the host, gives it its own /dev/shm, /sys and /etc/hosts, says "ready", and waits for its input to end. The
input ends when the process that made the hosts ends, in any way. Then it ends every process of its network and removes
the hosts' files. The kernel removes the namespaces with the last process. Standard library only, so that it starts
quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC = 2, 4, 8, 4096, 16384


def mount(source: str, target: str, kind: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None) != 0:
        raise OSError(ctypes.get_errno(), f"mounting {kind or 'a file'} on {target}")


def furnish(name: str, names_file: str) -> None:
    """Sets up the differences between hosts besides their networks."""
    socket.sethostname(name)
    mount("ringlet", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV)
    # /sys/class/net shows the network of the process that mounted it. The control groups stay the machine's.
    groups = os.open("/sys/fs/cgroup", os.O_PATH) if os.path.isdir("/sys/fs/cgroup") else None
    mount("ringlet", "/sys", "sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if groups is not None:
        mount(f"/proc/self/fd/{groups}", "/sys/fs/cgroup", "", _MS_BIND | _MS_REC)
        os.close(groups)
    mount(names_file, "/etc/hosts", "", _MS_BIND)


def network_of(process: str) -> int:
    return os.stat(f"/proc/{process}/ns/net").st_ino


def end_members() -> None:
    """SIGKILL to every other process of this network, until there is none: one may fork while another is ended."""
    network, own = network_of("self"), os.getpid()
    found = True
    while found:
        found = False
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != own:
                with contextlib.suppress(OSError):
                    if network_of(entry) == network and not is_zombie(entry):
                        os.kill(int(entry), signal.SIGKILL)
                        found = True


def is_zombie(pid: str) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in ("Z", "X")


def remove_folder(folder: str) -> None:
    """Removes the folder. Every keeper and the maker itself try."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, entry))
        os.rmdir(folder)


def main(name: str, names_file: str) -> None:
    if network_of("self") == network_of(str(os.getppid())):
        sys.exit("not in a network of its own: its end would end processes of the machine")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the end of input is what ends it
        signal.signal(number, signal.SIG_IGN)
    furnish(name, names_file)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    end_members()
    remove_folder(os.path.dirname(names_file))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

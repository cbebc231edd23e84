"""The system calls that code inside the sandbox may not make, as a filter for the kernel (classic BPF).

Namespaces and limits do most of the work; this closes what they leave open:

    memory that no limit counts      memfd_create, shmget, msgget, mq_open, io_uring, userfaultfd, larger socket buffers
    other processes' insides         ptrace, process_vm_*, pidfd_getfd, kcmp
    namespaces and mounts of its own unshare, setns, clone with CLONE_NEW*, mount and its relatives
    ways out                         sockets of other kinds than unix (vsock reaches a virtual machine's host)
    large parts of the kernel        bpf, perf_event_open, keyctl, modules, kexec, ...

Left out: other processors than x86-64 and 64-bit ARM, where the sandbox refuses to start.
"""

from __future__ import annotations

import errno
import platform
import struct

from strop.errors import ConfigError

X86 = {"arch": 0xC000003E, "clone": 56, "socket": 41, "socketpair": 53}
ARM = {"arch": 0xC00000B7, "clone": 220, "socket": 198, "socketpair": 199}
CLONE3 = 435
BOTH = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring_* (3), open_tree, move_mount, fs* (4), pidfd_getfd, mount_setattr, memfd_secret: newer calls have the same
number everywhere."""
# fmt: off
REFUSED = {
    # name: x86-64, ARM
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "userfaultfd": (323, 282), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "personality": (135, 92),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "setsockopt": (54, 208),
}
# fmt: on
FOR_AGENTS = frozenset(
    {
        *("memfd_create", "shmget", "msgget", "semget", "mq_open", "personality", "setsockopt"),
        *("mbind", "set_mempolicy", "migrate_pages", "move_pages"),
    }
)
"""What an agent's programs may ask for: memory is limited by looking at it, and the network is the machine's."""
IO_URING = range(425, 428)
UNIX = 1
"""The only family of sockets: what event loops wake themselves with. There is no network to reach."""
NEW_NAMESPACE = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def build_filter(*, agent: bool = False) -> bytes:
    """The filter for this machine, as bubblewrap's --seccomp reads it. `agent`: for an agent's own programs, which have
    a network."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise ConfigError(
            f"the sandbox does not know the system calls of {machine}. Fix: run the box on x86-64 or ARM64"
        )
    calls, column = (X86, 0) if machine == "x86_64" else (ARM, 1)
    made = [_step(LOAD, ARCH), _step(EQUAL, calls["arch"], 1, 0), _step(RETURN, KILL), _step(LOAD, NUMBER)]
    made += [_step(AT_LEAST, 0x40000000, 0, 1), _refuse(errno.EPERM)]  # the calls of x32, which have other numbers
    old = [both[column] for name, both in REFUSED.items() if not (agent and name in FOR_AGENTS)]
    for number in (*old, *(number for number in BOTH if not (agent and number in IO_URING))):
        made += [_step(EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    made += [_step(EQUAL, CLONE3, 0, 1), _refuse(errno.ENOSYS)]  # its flags cannot be seen; libc falls back to clone
    made += [_step(EQUAL, calls["clone"], 0, 4), _step(LOAD, FIRST_ARGUMENT)]
    made += [_step(ANY_BIT, NEW_NAMESPACE, 0, 1), _refuse(errno.EPERM), _step(RETURN, ALLOW)]
    if agent:
        return b"".join([*made, _step(RETURN, ALLOW)])
    inspected = [_step(LOAD, FIRST_ARGUMENT), _step(EQUAL, UNIX, 1, 0), _refuse(errno.EAFNOSUPPORT)]
    made += [_step(EQUAL, calls["socket"], 1, 0), _step(EQUAL, calls["socketpair"], 0, len(inspected)), *inspected]
    return b"".join([*made, _step(RETURN, ALLOW)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction. `yes` and `no` are how many to skip."""
    return struct.pack("=HBBI", code, yes, no, value)


def _refuse(number: int) -> bytes:
    return _step(RETURN, REFUSE | number)

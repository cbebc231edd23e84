"""What agents that are commands run in, where they are to be kept from the rest of the machine."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from strop.config.describe import doc


class ContainerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A container for each rollout of a command. Limits have the names that the Python sandbox has for them."""

    runtime: Annotated[
        Literal["", "auto", "docker", "podman", "bubblewrap"],
        doc(
            "what makes the containers; default: none are made. auto: docker or podman where its engine answers, "
            "bubblewrap otherwise"
        ),
    ] = ""
    image: Annotated[str, doc("the image, for docker and podman; bubblewrap shows this machine's /usr")] = ""
    folder: Annotated[str, doc("the folder it runs in, and sees; default: the one in which strop was started")] = ""
    writable: Annotated[bool, doc("the agent may write to the folder it runs in")] = False
    mounts: Annotated[
        tuple[str, ...],
        doc("folders and files of this machine that it sees besides, read-only; with :rw at the end it may write"),
    ] = ()
    environment: Annotated[
        tuple[str, ...], doc("variables of the runner's environment that it gets, by name; others it does not")
    ] = ()
    memory_mb: Annotated[int, doc("memory of all its processes together"), Meta(ge=16)] = 2048
    disk_mb: Annotated[int, doc("its /tmp, which is private, in memory, and empty at first"), Meta(ge=1)] = 512
    processes: Annotated[int, doc("processes and threads, together"), Meta(ge=4)] = 512
    cpus: Annotated[
        float, doc("cores' worth of CPU time, for docker and podman; 0: as much as there is"), Meta(ge=0)
    ] = 0.0

"""Where the processes of a run are: on this machine. A cluster's machines are made elsewhere (cluster/), and given to
`train`, which knows them by this only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from strop.config import Config
from strop.engines import server_process
from strop.engines.base import Engine
from strop.engines.server_process import ServerLauncher
from strop.gateway.app import Gateway
from strop.gateway.keeper import WorkerKeeper, WorkerOrder
from strop.gateway.worker_process import EncodedStore
from strop.learner.launcher import HERE, Launcher

if TYPE_CHECKING:
    from strop.run.state import Run


class Machines:
    """This machine. `launcher` starts the processes that hold weights, and `servers` the engines' servers."""

    launcher: Launcher = HERE
    servers: ServerLauncher = server_process.HERE

    def adapt(self, config: Config) -> Config:
        """The settings that a run on these machines has. What its folder keeps is what was asked for."""
        return config

    def make_workers(
        self, gateway: Gateway, store: EncodedStore, engines: Mapping[str, Engine], order: WorkerOrder
    ) -> WorkerKeeper | None:
        """Gateway workers on other machines, if there are to be some."""
        return None

    async def watch(self, run: Run) -> None:
        """Have runners at work while the run is, beside its own pool. Never returns; raises what must end the run."""
        await asyncio.Event().wait()


THIS_MACHINE = Machines()

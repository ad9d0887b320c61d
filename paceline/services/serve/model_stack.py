"""The fleet of one model in a stack: its kvtransfer, its workers, its planner. It knows nothing of other models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import get_args

from paceline.core.adapters import adapter_folders
from paceline.core.config import ServeConfig
from paceline.core.machine import available_memory
from paceline.core.speculative import parse_speculative_config, with_draft_folder
from paceline.models.draft import is_draft_name
from paceline.models.files.folder_lease import FolderLease, lease_model
from paceline.models.sources.hub_adapter import cached_adapter
from paceline.services.common.credentials import Credentials
from paceline.services.common.secret import read_secret
from paceline.services.serve import checks
from paceline.services.serve.gpus import default_budget
from paceline.services.serve.managed_process import ManagedProcess
from paceline.services.serve.output import say, warn
from paceline.services.serve.processes import Processes
from paceline.services.serve.scaling_socket import ScalingSocket
from paceline.services.serve.settings import fleet_settings
from paceline.services.serve.worker_fleet import Role, WorkerFleet, tell_role


class ModelStack:
    """One model with its fleet, from `prepare` to `stop`.

    Args:
        config: the options of this model.
        folder: folder for the files of the fleet. The cluster is named after this folder and the model's number.
        label: prefix of the names of the model's processes in output; "" if there is only one model.
        on_lost: called with the error if the model can no longer be served.
        shared: names of the options that are given for several models.
    """

    def __init__(
        self,
        config: ServeConfig,
        processes: Processes,
        folder: Path,
        number: int,
        label: str,
        on_lost: Callable[[ModelStack, BaseException], object],
        shared: Collection[str] = (),
    ) -> None:
        self.config = config
        self.folder = Path()
        """Folder of the prepared model; only valid after `prepare`."""
        self.cluster = f"{folder.name}-{number}"
        self.socket = folder / f"scale-{number}.sock"
        """Path of the Unix socket through which the fleet is scaled."""
        self._processes = processes
        self._settings = folder / f"fleet-{number}.toml"
        self._label = label
        self._on_lost = on_lost
        self._shared = shared
        self._roles: tuple[Role, ...] = ()
        """Roles of workers that the model may have; only valid after `prepare`."""
        self._kvtransfer: ManagedProcess | None = None
        self._planner: ManagedProcess | None = None
        self._workers: WorkerFleet | None = None
        self._scaling: ScalingSocket | None = None
        self._leases: list[FolderLease] = []
        """Leases of the folders of the models, which a worker that starts again reads again."""

    async def prepare(self) -> None:
        """Fetch or convert the model and its draft model, and set their folders in this object and its options."""
        config = self.config
        # The draft model comes first, because it is small: its errors do not wait for the download of the model.
        speculative = parse_speculative_config(config.speculative_config)
        if speculative is not None and is_draft_name(speculative):
            draft = {"model": speculative.model, "revision": speculative.revision, "quantization": "none"}
            draft["quantization_config"] = draft["mmproj"] = ""
            name = f"{self._label}prepare (draft model)"
            folder = await self._processes.prepare(name, config.model_copy(update=draft))
            self._leases.append(lease_model(folder))
            text = with_draft_folder(config.speculative_config, folder)
            self.config = config.model_copy(update={"speculative_config": text})
        self.folder = await self._processes.prepare(f"{self._label}prepare", config)
        self._leases.append(lease_model(self.folder))
        if found := {name: str(cached_adapter(place)) for name, place in adapter_folders(config).items()}:
            # All services read the same folders, also if the hub has other content later.
            modules = [{"name": name, "path": path} for name, path in found.items()]
            self.config = self.config.model_copy(update={"lora_modules": json.dumps(modules)})
        self._roles = checks.roles_of(self.config, self.folder)
        checks.check_roles(self.config, self._roles, checks.named_roles(self.config, self._shared))
        others = dict.fromkeys({*get_args(Role)}.difference(self._roles), 0)
        self.config = self.config.model_copy(update=others)
        checks.check_model(self.config, self.folder)

    async def start(self, redis: str, secret: Path) -> None:
        """Start the workers and, if they have KV blocks, kvtransfer. Open the socket for scaling."""
        config = self.config
        # Workers of several models take turns on the cores by a file that all of them know.
        is_encoder = "pool" in self._roles
        turns = str(self._settings.parent / "turns") if self._label else ""
        text = fleet_settings(config, self.folder, redis, self.cluster, secret, is_encoder, turns)
        self._settings.write_text(text)
        arguments = [] if is_encoder else [f"--kvtransfer-address={await self._start_kvtransfer()}"]
        self._workers = workers = WorkerFleet(
            lambda worker: self._processes.worker(
                worker, self._options, *arguments, label=self._label, has_gpu=self._has_gpus
            ),
            partial(self._processes.supervise, on_broken=self._note_broken),
            self._processes.stop,
            partial(tell_role, Credentials(read_secret(str(secret)))),
            self._check_added,
            lambda line: say(f"  {self._label}{line.lstrip()}"),
            self._roles,
        )
        await workers.scale({role: getattr(config, role) for role in self._roles})
        self._scaling = ScalingSocket(self.socket, workers)
        await self._scaling.start()

    async def _start_kvtransfer(self) -> str:
        """Start kvtransfer, and return its address when it is ready."""
        # A kvtransfer that is started again finds the arena of its predecessor by this host id.
        self._kvtransfer = self._service("kvtransfer", f"--host-id={self.cluster}")
        await self._processes.start(self._kvtransfer, self._note_broken)
        return await self._kvtransfer.ready()

    async def ready(self) -> None:
        """Wait until the workers serve, and start the planner. Raises PacelineError if a worker does not serve."""
        assert self._workers is not None
        await self._workers.ready()
        if self.config.planner:
            options = [f"--supervisor-socket={self.socket}"]
            if self._has_gpus and not self.config.budget:
                options.append(f"--budget={default_budget(self.config, self._processes.gpus.count, self._roles)}")
            self._planner = self._service("planner", *options)
            await self._processes.start(self._planner, self._note_broken)
            await self._planner.ready()

    def worker_tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that have to be cancelled before `stop_workers`."""
        return [] if self._workers is None else self._workers.tasks()

    async def stop_scaling(self) -> None:
        if self._scaling is not None:
            await self._scaling.close()
        await self._processes.stop(self._planner)

    async def stop_workers(self) -> None:
        """Stop the workers and then kvtransfer, because workers need kvtransfer until they end."""
        if self._workers is not None:
            await self._workers.stop(self._processes.grace, self._processes.hurry)
        await self._processes.stop(self._kvtransfer)
        for lease in self._leases:
            lease.close()

    @property
    def _options(self) -> str:
        return f"--config={self._settings}"

    @property
    def _has_gpus(self) -> bool:
        """Whether each worker gets a GPU. A number, as in `cuda:1`, gives the same GPU to all workers."""
        return self.config.device == "cuda" and self._processes.gpus.count > 0

    def _service(self, role: str, *arguments: str) -> ManagedProcess:
        return self._processes.service(role, self._options, *arguments, label=self._label)

    def _note_broken(self, process: ManagedProcess, error: BaseException) -> None:
        if self._processes.stack_serves and self._workers is not None and self._workers.give_up(process):
            warn(f"{error}; the stack goes on without it")
        else:
            self._on_lost(self, error)

    def _check_added(self, added: Mapping[Role, int]) -> None:
        """Raise ConfigError if the model or the memory allows no such workers."""
        checks.check_roles(self.config, self._roles, added)
        checks.check_encode_workers(self.config, self.folder, added.get("encode", 0))
        if self._processes.stack_serves:  # the first workers were checked with the rest of the stack
            checks.check_more_workers(self.config, self.folder, sum(added.values()), available_memory())

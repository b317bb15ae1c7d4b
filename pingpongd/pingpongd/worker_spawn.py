"""Starting a worker's process: what it is told, and what it inherits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import structlog

from pingpong_bus.slab import Slab
from pingpong_worker.config import WorkerConfig
from pingpong_worker.shared_memory_names import PREFIX_VARIABLE
from pingpongd.config import DaemonConfig
from pingpongd.model_names import engine_arguments, engine_dtype
from pingpongd.process import Guard, WorkerProcess
from pingpongd.runtime_dir import RuntimeDir
from pingpongd.worker_handle import Worker

_log = structlog.get_logger()


class WorkerSpawn:
    """Starts workers; has to be called on the main thread."""

    process: ClassVar[type[WorkerProcess]] = WorkerProcess
    """What is started. `benchmarks/forked_workers.py` puts one here that forks: hundreds of workers on one machine."""

    def __init__(
        self,
        config: Callable[[], DaemonConfig],
        models: Mapping[str, str],
        runtime: RuntimeDir,
        slab: Slab,
        guard: Guard | None,
    ) -> None:
        """Args:
        config: gives the present configuration.
        models: a name or folder that an engine can load, for each model that groups serve, by name; see `Fleet`.
        runtime: where sockets and temporary files are.
        slab: of the token logs.
        guard: ends workers where this process cannot.
        """
        self._config = config
        self._models = models
        self._runtime = runtime
        self._slab = slab
        self._guard = guard

    def __call__(self, worker: Worker) -> WorkerProcess:
        """Start a process for the worker's present start.

        Raises:
            OSError: the system gives none.
        """
        process = self.process.spawn(self._told(worker), self._environment(), self._guard)
        process.on_line = partial(self._printed, worker.name)
        return process

    def _told(self, worker: Worker) -> WorkerConfig:
        group, config = worker.group, self._config()
        return WorkerConfig(
            name=group.name,
            devices=group.devices,
            cores=group.cores,
            engine=config.engine,
            model=self._models[worker.model],
            dtype=engine_dtype(config, group),
            session=config.session,
            decode_first=config.decode_first.enabled,
            grid_tokens=config.grid_tokens,
            batch_invariant=config.batch_invariant,
            calibrate=config.calibrate,
            paces=(config.decode_first.final, config.decode_first.inner),
            speculation_tokens=config.speculation.tokens if config.speculation.enabled else 0,
            keep_prefixes=config.prefixes.keep,
            host_cache_gib=config.prefixes.host_gib,
            engine_args=engine_arguments(config, group),
            environment=config.environment | group.environment,
            simulated=group.simulated or config.simulated,
            slab_fd=self._slab.fd,
            control=self._runtime.workers,
            bell=worker.bell,
            supervisor_pid=os.getpid(),
            heartbeat_s=worker.heartbeat_s,
            identity=worker.identity.decode(),
        )

    def _environment(self) -> dict[str, str]:
        """Ours, with temporary files and names in /dev/shm that are cleared away with the daemon."""
        return os.environ | {
            "TMPDIR": str(self._runtime.temporary),
            PREFIX_VARIABLE: self._runtime.segment_prefix,
            "PYTHONUNBUFFERED": "1",
        }

    def _printed(self, name: str, line: str) -> None:
        say: Callable[..., None] = _log.info if self._config().log_worker_output else _log.debug
        if line.startswith("WARNING pingpong_worker"):  # as the worker's own logger prints it; engines warn of much
            say = _log.warning
        elif line.startswith(("ERROR pingpong_worker", "CRITICAL pingpong_worker")):
            say = _log.error
        say("worker_output", worker=name, line=line)

"""Starting a real tritonserver as a child of this process, and stopping it to the last process."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from compress.errors import ServerError
from compress.host.cores import cores_here
from compress.vetting.scratch import scratch
from serve.config.shell_words import PLAIN
from serve.config.threads import CORES
from serve.http.message import Address
from serve.http.once import ask_once
from serve.repository.read import ModelInfo, read_models
from serve.repository.served import Served
from serve.triton.ending import Ending
from serve.triton.find import Triton, build_backends, find_triton
from serve.triton.flags import CACHE_BYTES, flags_for, loaders_for
from serve.triton.interpreter import environment
from serve.triton.leftovers import RUN, sweep_tritons
from serve.triton.log import failed_models, failures
from serve.triton.memory import check_room, limits, region_bytes, remove_regions
from serve.triton.ports import HOST, Ports, claim
from serve.triton.private import close_regions, hide
from serve.triton.processes import Family
from serve.triton.stubs import Kinship, Relatives, Stub, kill, signal_name

__all__ = ["Ports", "TritonOptions", "TritonServer"]

LEAST_FILES = 96  # it starts with 100, and not with 64
TOLD_S = 6.0  # that its end may take before somebody is told: some 4 where nothing is amiss
CONTROL_HEADER = "x-serve-control"
ADMINISTRATION = "shared-memory,logging,trace"  # in Triton's names for its interfaces; clients need none of them
QUIET_S = 10.0
"""How long after a model's failure another one's is waited for, so that both are told."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TritonOptions:
    """How tritonserver is run.

    Attributes:
        start_timeout_s: how long all models together may take to load and warm up.
        stop_timeout_s: how long requests in flight may take to end, and models to unload, before the server is killed.
        log_verbose: Triton's verbosity, 0 for none.
        explicit: let Triton's model control API load and unload models. Whoever reaches its HTTP port may then run
            code in it: the API takes files along.
        load: load every model at the start; only an explicit one, or one that heals, can start without.
        only: of the models, those to load at the start, with all that they need; the others come later. None for all.
            A load that fails later, or goes on, then doesn't make the whole server not ready.
        heal: let this process load a model again whose process has died. What administers Triton then asks for a word
            that only `control` has: model control (unless it is explicit), shared memory, logging and tracing.
        cache_bytes: of memory for answers, where a model has a response_cache.
        cpus: the cores that it and its models may run on; empty for all.
    """

    start_timeout_s: float = 120.0
    stop_timeout_s: float = 30.0
    log_verbose: int = 0
    explicit: bool = False
    load: bool = True
    only: frozenset[str] | None = None
    heal: bool = False
    cache_bytes: int = CACHE_BYTES
    cpus: tuple[int, ...] = ()


class TritonServer:
    """A tritonserver on loopback that serves a model repository, and dies with this process.

    It is started by `start` or as a context manager, and stopped by `stop`, which may be called twice.

    Attributes:
        repository: what it serves.
        log: the file that holds what it says.
        ended: ids of processes of its models that were ended on purpose, as their load took too long.
        wedged: models that were loaded again after a process of theirs had died: Triton never lets go of the old load.
    """

    def __init__(
        self,
        repository: Path,
        *,
        ports: Ports = Ports(),  # noqa: B008 - frozen
        options: TritonOptions = TritonOptions(),
        log: Path | None = None,
        served: Served | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            repository: a model repository.
            ports: where to listen; 0 takes a free one, which `http_address` and its like then tell.
            options: how to run it.
            log: the file for its log, which is written anew; a temporary one, kept when it fails, by default.
            served: checks the repository before each restart, and says what of it Triton gets.
        """
        self.repository = repository
        self.wedged: set[str] = set()
        self.ended: set[int] = set()
        token = f"triton-{secrets.token_hex(8)}"
        self.log = log or Path(tempfile.gettempdir()) / f"{token}.log"
        self._temporary_log = log is None
        self._wanted, self._options = ports, options
        self._served = served
        self._ports = ports
        self._family: Family | None = None
        self._run_folder = ExitStack()
        self._linked, self._embedded = "", False
        self._kinship = Kinship("")
        self._memory_prefix = f"{token}-"
        self._given_up = threading.Event()
        self._word = secrets.token_hex(16)

    @property
    def control(self) -> dict[str, str]:
        """The HTTP headers that what administers it asks for."""
        return {CONTROL_HEADER: self._word} if self._options.heal else {}

    @property
    def returncode(self) -> int | None:
        """How the process ended, negative for a signal; None while it runs, or where it was not started."""
        return None if self._family is None else self._family.returncode

    def stubs(self) -> list[Stub]:
        """The processes that run its Python models, now."""
        return self.relatives().stubs

    def relatives(self) -> Relatives:
        """All of its processes, and which is whose, now."""
        family, kinship = self._family, self._kinship
        return kinship.relatives([] if family is None else family.members())

    def end_stubs(self, model: str, spared: Collection[int]) -> None:
        """Kill the processes of a model with all that they began, but for some of them; Triton then ends the load that
        waits for them."""
        found = self.relatives()
        ends = [stub.pid for stub in found.stubs if stub.model == model and stub.pid not in spared]
        self.ended.update(ends)
        kill([*ends, *(pid for pid, stub in found.begun.items() if stub in ends)])

    def end_left(self) -> list[int]:
        """Kill what models' processes have begun that are gone; the ids of it."""
        return kill(self.relatives().left)

    def close_regions(self) -> None:
        """Keep other users from the shared memory of models that were loaded meanwhile."""
        close_regions(self._memory_prefix)

    @property
    def http_address(self) -> str:
        """host:port of the HTTP endpoint."""
        return f"{HOST}:{self._ports.http_port}"

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC endpoint."""
        return f"{HOST}:{self._ports.grpc_port}"

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics endpoint, path /metrics."""
        return f"{HOST}:{self._ports.metrics_port}"

    @property
    def pid(self) -> int | None:
        """Of tritonserver; None when it isn't running."""
        return self._family.pid if self.running and self._family is not None else None

    @property
    def running(self) -> bool:
        """Whether the process lives; it may have died since it was started."""
        return self._family is not None and self._family.returncode is None

    def start(self) -> Self:
        """Start it and wait until every model is ready.

        Raises:
            RepositoryError: there is nothing to serve.
            MissingExtraError: there is no tritonserver.
            ServerError: it can't run here, a port is taken, or a model does not load; nothing is left running.
        """
        if self._family is not None:
            raise ServerError("can't start Triton twice", why="it was started and not stopped", mend="stop it first")
        _check_log(self.log)
        _check_files()
        models = read_models(self.repository) if self._options.load else []
        only = self._options.only
        first = models if only is None else [model for model in models if model.name in only]
        triton = find_triton()
        self._embedded = triton.backends is None
        # With the wheel, ours is the ONNX Runtime backend, and it runs in such processes, too.
        check_room(first if self._embedded else [each for each in first if each.config.backend == "python"])
        self._ports = claim(self._wanted)
        try:
            sweep_tritons()
            run_folder = self._run_folder.enter_context(scratch(RUN, self._memory_prefix))
            backends = build_backends(triton, run_folder / "backends")
            link = self._link(run_folder)
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.unlink(missing_ok=True)
            os.close(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            empty = run_folder / "empty"  # where it is started may hold modules of anybody's
            empty.mkdir()
            self._family = Family(
                self._command(triton, backends, link, models, first),
                environ=_environ(triton, run_folder / "python", cores_here(self._options.cpus).count),
                log=self.log,
                folder=empty,
                cpus=self._options.cpus,
            )
            self._wait_until_ready(first)
        except OSError as err:
            self._stop(keep_log=True)
            raise ServerError(
                "can't start Triton", why=str(err), mend="free space, or name a log file that you may write to"
            ) from err
        except BaseException:
            self._stop(keep_log=True, within_s=1.0)  # nobody was answered yet; the log is evidence now
            raise
        return self

    def restart(self) -> Self:
        """Start it again on the same ports after it has died; the log of before is kept as LOG.previous.

        Raises:
            ServerError: as `start` does.
        """
        self._stop(keep_log=True)
        self._wanted = self._ports
        if self._served is not None:
            self._served.renew(self._options.only)  # what comes later is checked then
        if self.log.exists():
            self.log.replace(self.log.with_name(f"{self.log.name}.previous"))
        return self.start()

    def give_up(self) -> None:
        """End a start that is under way in another thread; it then fails, and none succeeds any more."""
        self._given_up.set()

    def stop(self, within_s: float | None = None) -> None:
        """Let requests in flight end, stop the server, and kill what is left; a second call does nothing.

        Args:
            within_s: how long that may take; None for as long as its options say.

        Raises:
            ServerError: a process of it can't be ended.
        """
        self._stop(keep_log=not self._temporary_log, within_s=within_s)

    def _stop(self, *, keep_log: bool, within_s: float | None = None) -> None:
        family, self._family = self._family, None
        left: list[int] = []
        with self._run_folder:
            if family is not None:
                # Triton keeps to the timeout itself, and then needs a moment.
                patience_s = self._options.stop_timeout_s + 5.0
                patience_s = patience_s if within_s is None else within_s
                telling = threading.Timer(TOLD_S, _tell_of_wait, (patience_s,))
                telling.daemon = True
                telling.start()
                try:
                    family.end(patience_s, self._enough(family))
                finally:
                    telling.cancel()
                    self.wedged.clear()
                    left = family.members()
                    remove_regions(self._memory_prefix)
        if not keep_log:
            self.log.unlink(missing_ok=True)
        if left:
            pids = ", ".join(map(str, left))
            raise ServerError("can't stop Triton", why=f"SIGKILL does not end {pids}", mend=f"see `ps -p {pids}`")

    def _enough(self, family: Family) -> Callable[[], bool]:
        """Whether it need not be waited for; what belongs to a whole installation, with GPUs it may be, always is."""
        if not self._embedded:
            return lambda: False
        kinship = self._kinship
        return Ending(self.log, lambda: kinship.relatives(family.members()), Path(self._linked), wedged=self.wedged)

    def __enter__(self) -> Self:
        return self.start() if self._family is None else self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _link(self, run_folder: Path) -> Path:
        """The repository by a path that any shell reads as one plain word, whatever its folder is called."""
        link = run_folder / "models"
        if not PLAIN.fullmatch(str(link)):
            raise ServerError(
                "can't start Triton",
                why=f"the folder for temporary files, {run_folder.parent}, has letters that a shell reads",
                mend="set TMPDIR to a folder with a plain name, such as /tmp",
            )
        folder = self.repository if self._served is None else self._served.folder
        link.symlink_to(folder.absolute(), target_is_directory=True)
        self._linked = str(link)
        self._kinship = Kinship(self._linked)
        return link

    def _command(
        self, triton: Triton, backends: Path, link: Path, models: list[ModelInfo], first: list[ModelInfo]
    ) -> list[str]:
        options, ports = self._options, self._ports
        closed = ADMINISTRATION if options.explicit else f"{ADMINISTRATION},model-repository"
        restricted = [f"{closed}:{name}={word}" for name, word in self.control.items()]
        return [
            str(triton.binary.absolute()),
            f"--model-repository={link}",
            f"--backend-directory={backends}",
            f"--model-control-mode={'explicit' if options.explicit or options.heal else 'none'}",
            # By name: "*" takes folders with a dot in front, too, which nobody has looked at.
            *(f"--load-model={model.name}" for model in first if options.explicit or options.heal),
            *(f"--http-restricted-api={rule}" for rule in restricted),
            *(f"--grpc-restricted-protocol={rule}" for rule in restricted),
            "--disable-auto-complete-config",
            f"--strict-readiness={'true' if options.only is None else 'false'}",
            "--exit-on-error=true",
            f"--exit-timeout-secs={max(1, round(options.stop_timeout_s))}",
            f"--http-address={HOST}",
            f"--http-port={ports.http_port}",
            f"--grpc-address={HOST}",
            f"--grpc-port={ports.grpc_port}",
            f"--metrics-address={HOST}",
            f"--metrics-port={ports.metrics_port}",
            f"--backend-config=python,shm-default-byte-size={region_bytes(models)}",
            f"--backend-config=python,shm-region-prefix-name={self._memory_prefix}",
            f"--log-verbose={options.log_verbose}",
            *flags_for(models, options.cache_bytes, triton.caches),
            *([] if options.only is None else [f"--model-load-thread-count={loaders_for(models)}"]),
        ]

    def _wait_until_ready(self, models: list[ModelInfo]) -> None:
        """Return when the server and each model say that they are ready, which is after their warm-up."""
        paths = ["/v2/health/ready", *(f"/v2/models/{model.name}/ready" for model in models)]
        deadline = time.monotonic() + self._options.start_timeout_s
        failed, since = 0, 0.0
        hidden = False
        while paths:
            if not hidden and self._family is not None and self._said():  # it has read its command line
                hidden = hide(self._family.pid, self._word)
            if (now := len(failed_models(self._said()))) > failed:
                failed, since = now, time.monotonic()
            if self._get_ok(paths[0]):
                paths.pop(0)
            elif not self.running:
                raise self._failed(f"tritonserver {signal_name(self.returncode or 0)} before it was ready")
            elif self._given_up.is_set():
                raise self._failed("the start was given up")
            elif failed and time.monotonic() - since > QUIET_S:  # it would go on loading the others, and end then
                raise self._failed("a model failed to load")
            elif time.monotonic() > deadline:
                raise self._failed(f"not ready after {self._options.start_timeout_s:g} s")
            else:
                time.sleep(0.05)
        close_regions(self._memory_prefix)

    def _get_ok(self, path: str) -> bool:
        try:
            return ask_once(Address(HOST, self._ports.http_port), "GET", path, timeout_s=5.0)[0] == 200
        except OSError:
            return False

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _failed(self, otherwise: str) -> ServerError:
        log = self._said()
        reasons = failures(log.replace(self._linked, str(self.repository)) if self._linked else log)
        return ServerError(
            f"can't serve {self.repository}",
            why="; ".join(reasons) or otherwise + limits(),
            mend=f"`serve lint {self.repository}` says how; the whole log is in {self.log}",
        )


def _check_files() -> None:
    """With too few, it does not say so: its log fills with a line for each connection that it can't take."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_FILES:
        raise ServerError(
            "can't start Triton",
            why=f"it may have {most} files open, and needs {LEAST_FILES} at least",
            mend="raise that: ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker",
        )


def _check_log(path: Path) -> None:
    """Raises ServerError where the log is no file: it is written anew, and a device would be gone for everybody."""
    if path.exists() and not path.is_file():
        raise ServerError(
            f"can't log to {path}", why="it is no file", mend="name a file that may be written anew, or leave --log out"
        )


def _environ(triton: Triton, folder: Path, cores: int) -> dict[str, str]:
    """The environment for tritonserver: its libraries, and a Python for its stubs, which may be made in a folder.

    What computes there is told how many cores there are: libraries count those of the machine.
    """
    environ = dict(os.environ)
    # A stub takes the site-packages of the first python3 on PATH: unresolved, or a virtual environment is left out.
    own = str((triton.interpreter or Path(sys.executable)).parent)
    first = [] if triton.before is None else [str(environment(folder, triton.before))]
    environ["PATH"] = os.pathsep.join([*first, own, environ.get("PATH", os.defpath)])
    folders = [environ.get("LD_LIBRARY_PATH", ""), *map(str, triton.library_folders)]
    environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environ.setdefault(name, "1")  # instances share the cores: numpy in a hook must not take them all
    environ.setdefault("RAYON_NUM_THREADS", str(cores))  # tokenizers
    environ[CORES] = str(cores)
    return environ


def _tell_of_wait(seconds: float) -> None:
    logger.warning("Triton ends what it has begun, and sequences that are open; it is killed after %.0f s", seconds)

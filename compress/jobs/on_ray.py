"""A search's candidates made on a Ray cluster: what is read and made goes through a folder that all machines share.

Nothing is measured there: clocks of unlike machines don't compare. The machine that the command runs on measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from compress.cluster.connect import connected
from compress.cluster.nodes import Needs, alive, at_once, check_nodes, differing, facts
from compress.cluster.shared import FOLDER, LAYERS, Shared
from compress.cluster.tasks import answers, as_task, settings_here
from compress.errors import RecipeError, ResourceError, ServerError, ToolkitError
from compress.evaluate.candidates import Candidate
from compress.evaluate.search_result import Trial
from compress.formats.files import files_of
from compress.jobs.branch import Setting, Silent, made
from compress.jobs.recipe import INPUTS, code_of, find_data
from compress.options import OptimizeOptions, SensitivityOptions
from compress.options.user_code import is_code
from compress.storage.stage_cache import StageCache
from compress.storage.steady import steady

__all__ = ["OnRay", "Task", "needs_of", "on_ray", "reads_of"]

Options = TypeVar("Options", OptimizeOptions, SensitivityOptions)


@dataclass(frozen=True)
class Task:
    """What goes to a node besides the work itself.

    Attributes:
        needs: cores and GPUs that Ray gives it.
        settings: variables of this project's.
        facts: of the machine that the command runs on; a node that has joined since was not looked at before.
        code: of the user.
        shared: the folder that all nodes have; one that has joined since may not.
        known: what was read before, of that folder, as `Shared.known` tells it.
    """

    needs: Needs
    settings: dict[str, str]
    facts: dict[str, str]
    code: tuple[str, ...]
    shared: Shared
    known: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def begun(self, *reads: Path) -> Iterator[Path]:
        """On a node, a folder to work in.

        Args:
            reads: the inputs, where they were placed.

        Raises:
            ServerError: the node would give another result.
            ResourceError: it does not have the folder, or in it other inputs.
        """
        with as_task(self.needs, self.settings) as work, steady(self.known or None):
            if not self.shared.root.is_dir():
                raise ResourceError(
                    f"the node {_here()} does not see {self.shared.given}",
                    why="it has no such folder; it has joined the cluster since the others were looked at",
                    mend="mount the folder there, or take that node out; then give the same command again",
                )
            if other := differing(self.facts, facts(self.code)):
                mend = "install the same on each node and start Ray there anew; or take that node out of the cluster"
                raise ServerError(f"the node {_here()} would give other results", why=other, mend=mend)
            if wrong := next(filter(None, map(self.shared.check, reads)), ""):
                mend = (
                    "give the same command again, which puts it there anew; if that is told again, look at that folder"
                )
                raise ResourceError(f"the node {_here()} would work on something else", why=wrong, mend=mend)
            yield work


def _here() -> str:
    """The address of the node that a task runs on."""
    import ray.util

    return str(ray.util.get_node_ip_address())


def reads_of(checkpoint: Path, options: Options) -> list[Path]:
    """The files and folders that a model and options name."""
    found = [checkpoint]
    for name in INPUTS:
        source = getattr(options, name, None)
        if source is not None and not is_code(str(source)):
            found.append(Path(source))
    return found


class OnRay:
    """A cluster that has been looked at.

    Args:
        ray: connected.
        shared: the folder that all nodes have.
        task: what goes to each.
        slots: tasks that run at the same time.
    """

    def __init__(self, ray: Any, shared: Shared, task: Task, slots: int) -> None:
        self.ray, self.shared, self._task, self.slots = ray, shared, task, slots

    @property
    def task(self) -> Task:
        """What goes to each node now."""
        return dataclasses.replace(self._task, known=self.shared.known())

    @property
    def cache(self) -> StageCache:
        """What tasks keep, for the machine that measures it, and for the same command given again."""
        return self.shared.stages

    def placed(self, checkpoint: Path, options: Options) -> tuple[Path, Options]:
        """The model file and the options as nodes take them: what is read lies where each finds it."""
        given: dict[str, Any] = {}
        for name in INPUTS:
            source = getattr(options, name, None)
            if source is not None and not is_code(str(source)):
                path = Path(find_data(str(source), checkpoint))
                if path.exists():  # else who reads it says so
                    given[name] = type(source)(self.shared.place(path))
        there = self.shared.place(checkpoint, files_of(checkpoint) if checkpoint.exists() else ())
        return there, dataclasses.replace(options, **given)

    def made(
        self, setting: Setting, groups: Sequence[Sequence[Candidate]], wanted: Callable[[], Collection[int]]
    ) -> Iterator[tuple[int, list[Trial]]]:
        """Trials of groups of candidates, a task each, by place and in the order in which they end.

        Raises:
            ToolkitError: what a task ended with.
        """
        checkpoint, options = self.placed(setting.checkpoint, setting.options)
        there = dataclasses.replace(setting, checkpoint=checkpoint, options=options, cache=self.cache)
        task = self.task
        # A process whose CUDA has begun without GPUs never sees one: where a training will have some, all tasks do.
        if not task.needs.gpus and not any(candidate.trained for group in groups for candidate in group):
            task = dataclasses.replace(task, needs=Needs(options.threads))
        given = [(task, self.shared, there, group) for group in groups]
        yield from self.answers(_branch, given, wanted, task.needs)

    def answers(
        self, work: Callable[..., Any], given: Sequence[tuple[Any, ...]], wanted: Callable[[], Collection[int]],
        needs: Needs | None = None,
    ) -> Iterator[tuple[int, Any]]:  # fmt: skip
        """What tasks give, by place, as they come.

        Args:
            work, given, wanted: as of `compress.cluster.tasks.answers`.
            needs: of one of these tasks, where it is not what tasks of the command need.

        Raises:
            ToolkitError: what a task gave in place of an answer.
        """
        with closing(answers(self.ray, work, given, needs or self._task.needs, wanted)) as coming:
            for place, answer in coming:
                if isinstance(answer, ToolkitError):
                    raise answer
                yield place, answer


@contextmanager
def on_ray(options: OptimizeOptions | SensitivityOptions, default: Path) -> Iterator[OnRay | None]:
    """The cluster that options name, looked at before any work; None where they name none.

    Args:
        options: of a command.
        default: the folder to share, where the options name none.

    Raises:
        ToolkitError: it can't be had, or could not do the work.
    """
    if options.ray is None:
        yield None
        return
    if getattr(options, "tensorboard", None) is not None:
        raise RecipeError(
            "--tensorboard can't go with --ray", why="trainings run on the nodes, and would write their logs there",
            mend="leave it out; `compress finetune --tensorboard` shows the training of the one that was chosen",
        )  # fmt: skip
    code = tuple(code_of(options))
    with connected(options.ray) as ray:
        # What a search goes on with, a sensitivity is not to remove.
        kind = LAYERS if isinstance(options, SensitivityOptions) else FOLDER
        shared = Shared.at(options.shared or default, kind)
        try:
            needs = needs_of(options, alive(ray))
            slots = check_nodes(ray, shared, needs, code)
            yield OnRay(ray, shared, Task(needs, settings_here(), facts(code), code, shared), slots)
        finally:
            shared.remove_empty()


def needs_of(options: OptimizeOptions | SensitivityOptions, nodes: Sequence[Mapping[str, Any]]) -> Needs:
    """Of one task: the cores that it trains and answers on, and the GPUs that it trains on.

    What trains is decided once, for all tasks: with `--accelerator auto`, GPUs where a node has as many.

    Args:
        options: of a command.
        nodes: of the cluster, as Ray tells of them.
    """
    if isinstance(options, SensitivityOptions):
        return Needs()
    if options.finetune is None:
        return Needs(options.threads)
    each = options.train_threads or options.threads
    on_gpus = Needs(each, options.devices)
    if options.accelerator == "cuda" or (options.accelerator == "auto" and at_once(nodes, on_gpus)):
        return on_gpus
    return Needs(each * options.devices)


def _branch(task: Task, shared: Shared, setting: Setting, group: Sequence[Candidate]) -> list[Trial] | ToolkitError:
    """On a node: the candidates of one ratio. An error of the user's goes back as what it is, not as one of Ray's."""
    try:
        with task.begun(*reads_of(setting.checkpoint, setting.options)) as work:
            shared.lend(work)
            try:
                return made(dataclasses.replace(setting, work=work), group, Silent())
            finally:
                shared.keep(work)
    except ToolkitError as err:
        return err

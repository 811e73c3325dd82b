"""Hooks around a network that came with its tokenizer or image processor, where the user gives none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress.artifact import Artifact
from compress.errors import RepositoryError
from serve.hooks.load import Hooks, load_hooks
from serve.hooks.served_texts import ARRAYS, NAME, TOKENIZER, NoTextsError, served_texts
from serve.pack.images import write_image_hooks

__all__ = ["Around", "around"]


@dataclass(frozen=True)
class Around:
    """What stands around a network.

    Attributes:
        hooks: the user's, or those for texts or images.
        task: what the served model does, where these are not the user's.
        notes: what to know before it is served.
    """

    hooks: Hooks | None
    task: str = ""
    notes: tuple[str, ...] = ()


@contextmanager
def around(
    source: Artifact, hooks: Path | None, *, text: bool | None, pair: bool | None, image: bool = False
) -> Iterator[Around]:
    """The hooks of a pack, whose files are there as long as this lasts.

    Args:
        source: of the network.
        hooks: the user's.
        text: whether the served model takes texts; None where its tokenizer came along and its answers are no tokens'.
        pair: whether two texts make one sample; None is what the artifact says.
        image: whether the served model takes image files.

    Raises:
        HookError: the hooks can't be used with it, or it can't be served to texts, or images, and is to be.
        RepositoryError: of hooks, texts and images more than one is asked for.
        DatasetError: the tokenizer contradicts what stands beside it.
        MissingExtraError: tokenizers is not installed.
    """
    if image and (text or pair):
        why = "both would stand before the network"
        raise RepositoryError("can't pack with --image and --text", why=why, mend="leave one of the two out")
    if hooks is not None:
        if text or pair or image:
            flag, task = ("--image", "image-classification") if image else ("--text", "text")
            raise RepositoryError(
                f"can't pack with {flag} and the hooks {hooks}",
                why="both would stand before the network",
                mend=f"leave one of the two out; `serve hooks new --task {task}` writes hooks to begin with",
            )
        yield Around(load_hooks(hooks, source.signature))
        return
    processor = source.processor
    if image:
        with tempfile.TemporaryDirectory() as folder:
            path = write_image_hooks(source, Path(folder))
            yield Around(load_hooks(path, source.signature), "" if processor is None else processor.task)
        return
    asked = text if text is not None else pair or (processor is not None and processor.kind == "text")
    if not asked:
        images = processor is not None and processor.kind == "image"
        told = "it takes arrays, no image files: its image processor came along, --image puts it in front"
        yield Around(None, notes=(told,) if images else ())
        return
    try:
        code, notes = served_texts(source, pair=pair)
    except NoTextsError as err:
        if text or pair:
            raise
        mend = str(err.mend).removesuffix(f"; {ARRAYS}")
        yield Around(None, notes=(f"it takes tokens as arrays, no texts: {err.why} ({mend})",))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        path.write_text(code, encoding="utf-8")
        if processor is not None:
            shutil.copyfile(processor.folder / TOKENIZER, path.with_name(TOKENIZER))
        yield Around(load_hooks(path, source.signature), "" if processor is None else processor.task, notes)

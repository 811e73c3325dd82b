"""Data as people have it becomes what `Dataset.open` takes: made once in a process, by what came with the model."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
from contextlib import ExitStack
from pathlib import Path

from compress.data.dataset import MADE_OF, SCRATCH
from compress.data.folders import refuse_folder
from compress.data.images import images_in, is_image_folder, write_index
from compress.data.texts import write_tokens
from compress.errors import DatasetError
from compress.processor import Processor
from compress.storage.steady import seen
from compress.vetting.arrow_rows import is_saved, saved_files
from compress.vetting.heard import listener, unheard
from compress.vetting.scratch import scratch, sweep
from compress.vetting.shards import is_sharded, shards_of
from compress.vetting.tables import SUFFIXES, check_file

__all__ = ["arrays_of"]

_made: dict[str, str] = {}  # by all that decides what is made


def arrays_of(source: str, processor: Processor | None) -> str:
    """Where a source's arrays lie: a folder that was made of it, for texts and images; the source itself otherwise.

    Args:
        source: a file of texts (`compress.vetting.tables.SUFFIXES`), a folder of them that `datasets` saved, one of
            Parquet files, one of images, or any other source.
        processor: of the model.

    Raises:
        DatasetError: there is no processor for it, it can't be read, or is a folder of none of these.
    """
    path = Path(source)
    saved = is_saved(path)
    sharded = not saved and is_sharded(path) and not is_image_folder(path)
    text = saved or sharded or (path.suffix in SUFFIXES and not path.is_dir())
    kind = "text" if text else "image" if is_image_folder(path) else None
    if kind is None:
        refuse_folder(path)
        return source
    if text:
        check_file(path)
    if processor is None or processor.kind != kind:
        takes = "brings no tokenizer or image processor" if processor is None else f"takes {processor.kind}s"
        raise DatasetError(
            f"can't use the data {source}",
            why=f"it holds {kind}s, and the model {takes}",
            mend="name a Hugging Face folder with its tokenizer or processor as the model; or give arrays in an .npz",
        )
    rows = saved_files(path) if saved else shards_of(path) if sharded else [path]
    files = rows if text else images_in(path)
    told = [(str(file), found.st_mtime_ns, found.st_size) for file in files if (found := _stat(file)) is not None]
    key = json.dumps([
        str(path.resolve()), str(processor.folder), processor.to_dict(), dataclasses.astuple(processor.columns), told,
    ], sort_keys=True)  # fmt: skip
    for file in files if text or key in _made else ():  # images that are new are looked at one by one, below
        seen(file, tell=listener() if text else unheard)
    if key not in _made:
        sweep(SCRATCH)
        held = ExitStack()
        atexit.register(held.close)
        folder = held.enter_context(scratch(SCRATCH)) / "arrays" / path.name
        folder.mkdir(parents=True)
        (write_tokens if kind == "text" else write_index)(path, processor, folder)
        (folder / MADE_OF).write_text(source, errors="surrogateescape")
        _made[key] = str(folder)
    return _made[key]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # who reads it says why
        return None

"""What Triton is given to load: the repository itself or, where it has to be signed, a copy of what was verified.

Triton's Python stubs run in isolated mode: no variable of the environment keeps them from writing byte code beside
their models, and from running byte code that lies there. In a copy of its own that is Triton's affair alone; the
repository stays as it was signed, and what changes there after it was verified reaches nobody.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import RepositoryError
from compress.vetting.scratch import scratch, sweep
from serve.repository.signing import check_files

__all__ = ["Served", "serving"]

COPIES = "served-"


class Served:
    """A repository that is checked before it is loaded, each time.

    Args:
        repository: holds the models.
        public_key: of whoever has to have signed it; None where nobody has.
        trust_changes: as `check_files`.
        folder: an empty one for copies, which nobody else can write to; only looked at where there is a key.

    Attributes:
        repository: as above.
        folder: what Triton is given. It stays the same, whatever stands behind it.
        signed: whether nothing may be loaded but what is signed.
    """

    def __init__(self, repository: Path, public_key: Path | None, folder: Path, *, trust_changes: bool = False) -> None:
        self.repository = repository
        self.signed = public_key is not None
        self.folder = folder / "models" if self.signed else repository
        self._public_key = public_key
        self._trust_changes = trust_changes
        self._copies = folder
        self._lock = threading.Lock()

    def renew(self, models: Collection[str] | None = None) -> None:
        """Check the repository, and put what was verified in place of what was there; makes one copy at a time.

        Args:
            models: those to check, where nothing has to be signed; None for all.

        Raises:
            RepositoryError: it is not what was packed, or signed; what was there stays.
        """
        if not self.signed:  # with no lock: reading one model may hang, and others are loaded meanwhile
            check_files(self.repository, None, trust_changes=self._trust_changes, models=models)
            return
        with self._lock:
            try:
                copy = Path(tempfile.mkdtemp(prefix="verified-", dir=self._copies))
                try:
                    check_files(self.repository, self._public_key, trust_changes=self._trust_changes, into=copy)
                except BaseException:
                    copy.rmdir()
                    raise
                link = self._copies / "new"
                link.unlink(missing_ok=True)
                link.symlink_to(copy, target_is_directory=True)
                link.replace(self.folder)  # at once, for a Triton that reads meanwhile
                for path in self._copies.glob("verified-*"):
                    if path != copy:
                        shutil.rmtree(path, ignore_errors=True)
            except OSError as err:
                raise RepositoryError(
                    f"can't copy {self.repository}",
                    why=str(err),
                    mend="free space, or set TMPDIR to a folder with more",
                ) from err


@contextmanager
def serving(repository: Path, public_key: Path | None, *, trust_changes: bool = False) -> Iterator[Served]:
    """A repository that was checked; its copy, if any, goes when the block ends.

    Raises:
        RepositoryError: it is not what was packed, or signed.
    """
    sweep(COPIES)
    with scratch(COPIES) as folder:
        served = Served(repository, public_key, folder, trust_changes=trust_changes)
        served.renew()
        yield served

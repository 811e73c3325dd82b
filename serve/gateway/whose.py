"""Who may have a say in the files that a gateway goes by."""

from __future__ import annotations

import os
from contextlib import suppress

from compress.errors import ServerError
from compress.vetting.ours import check_ours
from serve.gateway.settings import Settings
from serve.rollout.state_file import check_state_file

__all__ = ["check_whose"]


def check_whose(settings: Settings) -> None:
    """Raise ServerError where other users may have a say in certificate, private key, rules or state file.

    The files of settings and of keys are looked at by who reads them, each time.
    """
    for path, alone in ((settings.tls_certificate, False), (settings.tls_key, False), (settings.agree_module, True)):
        try:
            if path is not None:
                check_ours(path, alone=alone)
        except OSError as err:
            why = err.strerror or str(err)
            raise ServerError(f"can't read {path}", why=why, mend="name a file that you may read") from err
    with suppress(OSError):  # it need not be there, in any folder; once it is, it is looked at each time it is read
        if os.path.lexists(settings.state):
            check_state_file(settings.state)

"""Words of a repository that Triton's Python backend writes, unquoted, into the shell line that starts its stub.

The path of the repository reaches that line, too: `serve.triton.launch` serves it through a link of its own making.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["MEND", "PLAIN", "unsafe_words"]

# No letter of these means anything to a shell, wherever it stands; a name may not look like an option or a file above.
PLAIN = re.compile(r"(?![-.]*$)(?!-)[A-Za-z0-9_.+:@=,/-]+")
MEND = "use letters, digits and any of . _ + : @ = , -"
_OWN_FOLDER = "$$TRITON_MODEL_DIRECTORY"  # Triton's own word for the model's folder


def unsafe_words(name: str, config: Any) -> list[tuple[str, str]]:
    """What of a model a shell would read as more than a word, as (what it is, the word).

    Args:
        name: of the model's folder.
        config: the protobuf message of its config.pbtxt.
    """
    words = [("the model's name", name), ("its default_model_filename", config.default_model_filename)]
    words += [("the name of an instance_group", group.name) for group in config.instance_group]
    if "EXECUTION_ENV_PATH" in config.parameters:
        path = config.parameters["EXECUTION_ENV_PATH"].string_value
        words.append(("its EXECUTION_ENV_PATH", path.removeprefix(_OWN_FOLDER)))
    return [(what, word) for what, word in words if word and not PLAIN.fullmatch(word)]

"""Write the evaluation images as PNG files in folders by label, as `serve verify` takes them.

python examples/digits/images.py eval.npz FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from demo import evaluation


def main(data: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for number, (image, label) in enumerate(zip(*evaluation(data), strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

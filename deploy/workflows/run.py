"""A workflow's shell lines, run in a fresh clone with what stands in for GitHub, its registry and a cluster.

Each job has a clone of HEAD. Artifacts are copied from job to job as GitHub does: from the folder that all its paths
have in common. kubectl's `apply` is Kustomize and the schemas, and `wait` finds what was applied, or fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from compress.errors import ServerError
from deploy.containers.build import IMAGES, build, check_machine
from deploy.containers.engine import find_engine
from deploy.workflows.steps import Step, filled, read_steps

__all__ = ["DONE", "FOLDER", "NOT_RUN", "Runner", "reason_not_to"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
DONE = {
    "actions/checkout": "a clone of HEAD",
    "actions/setup-python": "an environment of this Python's",
    "actions/upload-artifact": "copied",
    "actions/download-artifact": "copied",
    "docker/build-push-action": "built by the engine that is here, not pushed",
}
NOT_RUN = {
    "azure/setup-kubectl": "it downloads kubectl, which has to be here",
    "docker/setup-buildx-action": "the engine that is here builds without it",
    "docker/login-action": "it needs the registry",
    'sudo env "PATH=$PATH" ENGINE=podman make images-check': "`make images-check` is run by itself",
    'sudo env "PATH=$PATH" ENGINE=docker make images-check': "`ENGINE=docker make images-check` is run by itself",
    "bash .ci/run": "CI runs it at each change, and all of it each night; --whole does, here",
}
DIGEST = "sha256:" + "0" * 64


def reason_not_to(step: Step, *, whole: bool = False) -> str:
    """Why a step is not run here; "" where it is."""
    return "" if whole and step.run else NOT_RUN.get(step.uses or step.run.strip(), "")


class Runner:
    """Runs steps.

    Args:
        folder: an empty one, for clones and artifacts.
        whole: the steps that CI runs anyway, too, and environments made by pip rather than of what is installed here.

    Attributes:
        values: what GitHub's expressions stand for.
    """

    def __init__(self, folder: Path, *, whole: bool = False) -> None:
        self.values = _values()
        self._folder = folder
        self._whole = whole
        self._path = ""

    def workflow(self, path: Path) -> Iterator[tuple[Step, str]]:
        """Run its steps; after each, why it was not, or ""."""
        job = ""
        for step in read_steps(path):
            if step.job != job:
                job, self._path = step.job, os.environ["PATH"]
            why = reason_not_to(step, whole=self._whole)
            if step.uses == "docker/build-push-action":
                why = _why_nothing_is_built()
            if not why:
                self.step(step)
            yield step, why

    def step(self, step: Step) -> None:
        """Run one.

        Raises:
            subprocess.CalledProcessError: its lines fail.
            ValueError: it is an action or has an expression that nothing here stands in for.
        """
        clone = self._folder / f"{step.workflow}-{step.job}"
        inputs = {key: filled(str(value), self.values) for key, value in step.inputs.items()}
        match step.uses:
            case "":
                given = {key: filled(value, self.values) for key, value in step.env.items()}
                bare = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
                path = os.pathsep.join((str(_stand_ins(self._folder)), self._path or os.environ["PATH"]))
                lines = [*step.shell, "-c", filled(step.run, self.values)]
                subprocess.run(lines, cwd=clone, env={**bare, "PATH": path, **given}, check=True)
            case "actions/checkout":
                subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)  # noqa: S607
                if not self._whole:
                    _installed_here(clone)
            case "actions/setup-python":
                made = self._folder / f"python-{step.job}"
                subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
                self._path = f"{made / 'bin'}{os.pathsep}{self._path}"
            case "actions/upload-artifact":
                _upload(clone, inputs["path"].split(), self._folder / "artifacts" / inputs["name"])
            case "actions/download-artifact":
                shutil.copytree(self._folder / "artifacts" / inputs["name"], clone / inputs["path"])
            case "docker/build-push-action":
                name = Path(inputs["file"]).name.removesuffix(".Dockerfile")
                (image,) = [each for each in IMAGES if each.name == name]
                build(find_engine(), image, clone / inputs.get("context", "."), root=clone)
            case other:
                raise ValueError(f"nothing stands in for {other}")


def _why_nothing_is_built() -> str:
    """Why no image can be built here; "" where it can."""
    try:
        check_machine(find_engine(), ["gateway"], play=False)
    except ServerError as err:
        return f"{err.what}: {err.why}"
    return ""


def _upload(clone: Path, paths: list[str], artifact: Path) -> None:
    """As GitHub does: each by its path below what all of them have in common; what is missing is an error here."""
    root = Path(os.path.commonpath([clone / path for path in paths]))
    for path in paths:
        target = artifact / (clone / path).relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if (clone / path).is_dir():
            shutil.copytree(clone / path, target)
        else:
            shutil.copy2(clone / path, target)


def _values() -> Mapping[str, str]:
    openssl = str(shutil.which("openssl"))
    made = [openssl, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    key = subprocess.run(made, check=True, capture_output=True, text=True).stdout
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return {
        "github.sha": subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip(),
        "vars.REGISTRY": "registry.example/team",
        "vars.TRITON_IMAGE": "registry.example/team/triton:26.07-hooks",
        "needs.images.outputs.gateway": DIGEST,
        "needs.images.outputs.models": DIGEST,
        "secrets.KUBECONFIG": "apiVersion: v1\nkind: Config\n",
        "secrets.SIGNING_KEY": key,
        # The machine may be shared: what is judged here is that the steps run.
        "vars.MAX_REGRESSION": "500%",
    }


def _stand_ins(folder: Path) -> Path:
    """Programs that stand in for others, first in PATH."""
    made = folder / "stand-ins"
    if not made.exists():
        made.mkdir()
        kubectl = made / "kubectl"
        kubectl.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "kubectl.py").read_text())
        kubectl.chmod(0o755)
    return made


def _installed_here(clone: Path) -> None:
    """An environment for make: the clone's code, with the packages of this Python's environment."""
    bare = clone / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (bare / f"lib/{version}/site-packages/here.pth").write_text("\n".join([str(clone), *packages]) + "\n")
    for name in ("serve", "compress"):
        script = bare / "bin" / name
        script.write_text(f"#!{bare}/bin/python\nimport sys\nfrom {name}.__main__ import main\nsys.exit(main())\n")
        script.chmod(0o755)
    for name in ("bin/pip", ".torch-cpu", ".installed", ".installed-dev"):  # younger than the clone's files
        (bare / name).touch()

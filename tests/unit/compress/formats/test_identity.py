"""A model is known by all that decides its answers, and known again by another process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError
from compress.formats.checkpoint import fingerprint, write
from compress.formats.identity import unknown_of
from compress.model import TorchModel
from compress.model.infer import infer_signature

NET = """
import json
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, act=None, cfg=None):
        super().__init__()
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 4)
        self.act, self.cfg = act or torch.relu, cfg
    def forward(self, x):
        BODY
        x = self.act(self.l(x))
        if self.cfg is not None:
            x = x * self.cfg.k
        return self.m(x)
"""
BRANCHES = "if x.dim() != 2: raise ValueError('no')"
PLAIN = "from net import Net\ndef make(): return Net()"
# What the forward begins with, and the factory's module; VAL differs.
CASES = {
    "a partial": (
        BRANCHES,
        ("from net import Net\nimport functools, torch.nn.functional as F\n"
         "def make(): return Net(functools.partial(F.leaky_relu, negative_slope=VAL))"),
    ),
    "a lambda": (BRANCHES, "from net import Net\nimport torch\ndef make(): return Net(lambda x: torch.relu(x)*VAL)"),
    "a function": (
        BRANCHES, "from net import Net\nimport torch\ndef act(x): return torch.relu(x)*VAL\ndef make(): return Net(act)",
    ),
    "a closure": (
        BRANCHES,
        ("from net import Net\nimport torch\ndef mk(v):\n    def act(x): return torch.relu(x)*v\n    return act\n"
         "def make(): return Net(mk(VAL))"),
    ),
    "a global": (
        BRANCHES,
        "from net import Net\nimport torch\nK = VAL\ndef act(x): return torch.relu(x)*K\ndef make(): return Net(act)",
    ),
    "a global read from a file": (
        BRANCHES,
        ("from net import Net\nimport json, torch\nfrom pathlib import Path\n"
         "K = json.loads((Path(__file__).parent/'k.json').read_text())\n"
         "def act(x): return torch.relu(x)*K\ndef make(): return Net(act)"),
    ),
    "a module beside the factory": (
        BRANCHES, "from net import Net\nimport beside, torch\ndef make(): return Net(lambda x: torch.relu(x)*beside.K)",
    ),
    "an object": (
        BRANCHES, "from net import Net\nclass C: pass\ndef make():\n    c=C(); c.k=VAL; return Net(cfg=c)",
    ),
    "an object read from a file": (
        BRANCHES,
        ("from net import Net\nimport json\nfrom pathlib import Path\nclass C: pass\ndef make():\n"
         "    c=C(); c.k=json.loads((Path(__file__).parent/'k.json').read_text()); return Net(cfg=c)"),
    ),
    "a namespace": (
        BRANCHES, "from net import Net\nfrom types import SimpleNamespace\ndef make(): return Net(cfg=SimpleNamespace(k=VAL))",
    ),
    "a hook on a leaf, traceable": (
        "pass", "from net import Net\ndef make():\n    n=Net(); n.l.register_forward_hook(lambda m,i,o: o*VAL); return n",
    ),
    "a pre-hook on a leaf, traceable": (
        "pass",
        "from net import Net\ndef make():\n    n=Net(); n.l.register_forward_pre_hook(lambda m,i: (i[0]*VAL,)); return n",
    ),
    "a hook on the root, traceable": (
        "pass", "from net import Net\ndef make():\n    n=Net(); n.register_forward_hook(lambda m,i,o: o*VAL); return n",
    ),
    "a hook on the root": (
        BRANCHES, "from net import Net\ndef make():\n    n=Net(); n.register_forward_hook(lambda m,i,o: o*VAL); return n",
    ),
    "another forward of the root, traceable": (
        "pass", "from net import Net\ndef make():\n    n=Net(); f=n.forward; n.forward=lambda x: f(x)*VAL; return n",
    ),
    "another forward of the root": (
        BRANCHES, "from net import Net\ndef make():\n    n=Net(); f=n.forward; n.forward=lambda x: f(x)*VAL; return n",
    ),
    "another forward of a leaf, traceable": (
        "pass", "from net import Net\ndef make():\n    n=Net(); f=n.l.forward; n.l.forward=lambda x: f(x)*VAL; return n",
    ),
    "a class of the factory's": (
        "pass",
        ("from net import Net\nfrom torch import nn\nclass L(nn.Linear):\n"
         "    def forward(self,x): return super().forward(x)*VAL\ndef make():\n    n=Net(); n.l=L(8,8); return n"),
    ),
    "a class attribute": (BRANCHES + "\n        x=x*self.K", "from net import Net\ndef make():\n    Net.K=VAL; return Net()"),
    "a file that the forward reads": (
        BRANCHES + "\n        from pathlib import Path; x=x*json.load((Path(__file__).parent/'k.json').open())", PLAIN,
    ),
    "a layer in a list": (
        BRANCHES + "\n        x=self.hidden[0](x)",
        ("from net import Net\nimport torch\nfrom torch import nn\ndef make():\n"
         "    n=Net(); n.hidden=[nn.Linear(8,8)]\n    with torch.no_grad():\n"
         "        for p in n.hidden[0].parameters(): p.fill_(VAL)\n    return n"),
    ),
}  # fmt: skip
WORKER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from compress.formats.checkpoint import fingerprint_of_module, load
from compress.formats.identity import unknown_of
found = {}
for at in range(int(sys.argv[1])):
    sys.path.insert(0, f"{sys.argv[2]}/{at}")
    model = load(f"{sys.argv[2]}/{at}/sd.pt", inputs=["x:float32[batch,8]"], model="fac:make")
    with torch.no_grad():
        answer = float(model.module(torch.ones(2, 8)).sum())
    found[at] = [fingerprint_of_module(model), answer, unknown_of(model)]
    sys.path.pop(0)
    for name in ("net", "fac", "beside"):
        sys.modules.pop(name, None)
print(json.dumps(found))
"""


def written(folder: Path, value: str, cases: list[str]) -> Path:
    """The files of some cases, each in a folder of its own."""
    for at, (body, factory) in enumerate(CASES[case] for case in cases):
        (folder / str(at)).mkdir(parents=True)
        (folder / str(at) / "net.py").write_text(NET.replace("BODY", body))
        (folder / str(at) / "fac.py").write_text(factory.replace("VAL", value))
        (folder / str(at) / "beside.py").write_text(f"K = {value}\n")
        (folder / str(at) / "k.json").write_text(value)
        torch.manual_seed(0)
        layers = {"l": nn.Linear(8, 8), "m": nn.Linear(8, 4)}
        torch.save(nn.ModuleDict(layers).state_dict(), folder / str(at) / "sd.pt")
    return folder


def told(folder: Path) -> list[list[Any]]:
    """Fingerprint, answer and what is unknown of each case, by a process of its own."""
    asked = [sys.executable, "-c", WORKER, str(len(list(folder.iterdir()))), str(folder)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=True)
    return list(json.loads(done.stdout).values())


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], ...]]:
    """By case, of those that this run tries: what is told of 2.0, of 3.0, and of 2.0 by another process."""
    tried = {item.name for item in request.session.items}
    cases = [case for case in CASES if any(name.endswith(f"[{case}]") for name in tried)]
    root = tmp_path_factory.mktemp("identity")
    values = {"two": "2.0", "three": "3.0", "again": "2.0"}
    folders = [written(root / name, value, cases) for name, value in values.items()]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, zip(*pool.map(told, folders), strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_models_that_answer_otherwise_are_two_and_the_same_is_one_in_another_process(
    case: str, found: dict[str, tuple[list[Any], ...]]
) -> None:
    two, three, again = found[case]
    assert two[1] == again[1] != three[1], "the case itself"
    assert two[0] != three[0]
    assert two[0] == again[0]
    assert two[2] == three[2] == ""


class Branches(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(4, 4), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x)
        return answer if x.sum() > 0 else -answer


def model_of(module: nn.Module) -> TorchModel:
    module.eval()
    return TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,4]"),)))


@pytest.mark.parametrize(
    ("held", "named"),
    [(threading.Lock, "lock"), (lambda: (each for each in range(3)), "generator"),
     (lambda: SimpleNamespace(k=[threading.Lock()]), "lock")],
    ids=["a lock", "a generator", "deep inside"],
)  # fmt: skip
def test_what_nothing_tells_apart_makes_a_name_of_its_own_and_says_so(held: Callable[[], object], named: str) -> None:
    prints = []
    for _ in range(2):
        torch.manual_seed(0)
        model = model_of(Branches(held()))
        with pytest.warns(AssumedWarning, match=f"taken again by a later run.*({named})"):
            prints.append(fingerprint(model))
        assert fingerprint(model) == prints[-1], "within a run it is one"
        assert unknown_of(model)
    assert prints[0] != prints[1]


def test_circles_and_deep_structures_end() -> None:
    circle: list[Any] = []
    circle.append(circle)
    ring = SimpleNamespace()
    ring.me = ring
    assert fingerprint(model_of(Branches(ring)))
    with pytest.warns(AssumedWarning, match="more to it than is looked at"):
        fingerprint(model_of(Branches(circle)))


@pytest.mark.parametrize("at", ["0", "1.0", ""], ids=["a leaf", "a leaf within", "the root"])
@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
def test_a_file_of_layers_is_never_written_without_what_hooks_do(tmp_path: Path, at: str, how: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    layer = module.get_submodule(at)
    if how == "hook":
        layer.register_forward_hook(lambda _layer, _given, output: output * 2)
    elif how == "pre-hook":
        layer.register_forward_pre_hook(lambda _layer, given: (given[0] * 2,))
    else:
        layer.forward = lambda x: x * 2
    with pytest.raises(CheckpointError, match="can't write"):
        write(model_of(module), tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())

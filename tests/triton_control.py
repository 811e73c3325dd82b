"""A real Triton that is asked to load one model after the other, and survives those that kill it."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from serve.triton.launch import Ports, TritonOptions, TritonServer

__all__ = ["Control"]

LOAD_S = 15


class Control:
    """Triton's model control API; a Triton that dies of a model, or hangs, is started again."""

    def __init__(self, repository: Path, log: Path) -> None:
        self.repository, self.log = repository, log
        self.triton = self._start()

    def _start(self) -> TritonServer:
        options = TritonOptions(explicit=True, load=False, stop_timeout_s=3)
        return TritonServer(self.repository, ports=Ports(0, 0, 0), options=options, log=self.log).start()

    def loads(self, model: str, *, answering: bool = False) -> bool:
        """Whether Triton loads it, and answers a plain request if that is asked for; it is unloaded again."""
        try:
            loaded = self._post(f"repository/models/{_path(model)}/load")
            good = loaded and (not answering or self._answers(model))
            if loaded:
                self._post(f"repository/models/{_path(model)}/unload", {"parameters": {"unload_dependents": True}})
            hangs = False
        except (OSError, http.client.HTTPException) as err:
            good, hangs = False, isinstance(err, TimeoutError)
        time.sleep(0.02)
        if hangs or not self.triton.running:
            self.triton.stop()
            self.triton = self._start()
        return good

    def _answers(self, model: str) -> bool:
        """One request, made of what Triton says that it takes."""
        path = f"models/{_path(model)}"
        with urllib.request.urlopen(f"http://{self.triton.http_address}/v2/{path}", timeout=LOAD_S) as answer:
            asked = [dict(tensor) for tensor in json.load(answer)["inputs"]]
        for tensor in asked:
            first, *rest = tensor["shape"]
            tensor["shape"] = [max(1, first), *(4 if dim < 0 else dim for dim in rest)]
            count = 1
            for dim in tensor["shape"]:
                count *= dim
            tensor["data"] = (["0,2,1,0"] if tensor["datatype"] == "BYTES" else [0]) * count
        return self._post(f"{path}/infer", {"inputs": asked})

    def _post(self, path: str, body: Any = None) -> bool:
        url = f"http://{self.triton.http_address}/v2/{path}"
        request = urllib.request.Request(url, data=json.dumps(body or {}).encode(), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=LOAD_S):
                return True
        except urllib.error.HTTPError:
            return False


def _path(model: str) -> str:
    """As Triton reads it: it decodes nothing but what must be encoded."""
    return quote(model, safe="+$&'")

"""Triton's explicit model control by hand: what fails with "not ready" is loaded and asked again, of so many at most.

As such clients are written: requests are sent at once, a load is made once for all who wait, and the one that was used
longest ago is unloaded for it. `TRITON` names it (host:port), `FIT` how many models may be loaded.
"""

import asyncio
import os

import aiohttp
from aiohttp import web

TRITON, FIT = os.environ["TRITON"], int(os.environ["FIT"])
TRIES = 4


class Hand:
    def __init__(self, session):
        self.session = session
        self.used = {}  # by last use
        self.loading = asyncio.Lock()

    async def infer(self, request):
        model, body = request.match_info["model"], await request.read()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower().startswith(("inference-", "content-type"))
        }
        for _ in range(TRIES):
            async with self.session.post(
                f"http://{TRITON}/v2/models/{model}/infer", data=body, headers=headers
            ) as answer:
                told = await answer.read()
                if answer.status not in (400, 404):
                    if model in self.used:
                        self.used[model] = self.used.pop(model)
                    break
            await self.load(model)
        return web.Response(body=told, status=answer.status)

    async def load(self, model):
        asked = model in self.used
        async with self.loading:
            if model in self.used and not asked:
                return  # another has loaded it meanwhile
            self.used.pop(model, None)
            while len(self.used) >= FIT:
                await self.control(next(iter(self.used)), "unload")
            await self.control(model, "load")

    async def control(self, model, act):
        self.used.pop(model, None)
        async with self.session.post(f"http://{TRITON}/v2/repository/models/{model}/{act}", json={}) as answer:
            if answer.status == 200 and act == "load":
                self.used[model] = None


async def app():
    made = web.Application(client_max_size=1 << 26)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=256))
    made.router.add_post("/v2/models/{model}/infer", Hand(session).infer)
    return made


if __name__ == "__main__":
    web.run_app(app(), host="127.0.0.1", port=int(os.environ["PORT"]), access_log=None)

"""What the gateway's connections give an endpoint besides ASGI's messages, by their names in the scope's extensions."""

from __future__ import annotations

__all__ = ["BODY", "DROP", "GROWING", "LEAVING", "RESPOND", "STILL"]

RESPOND, LEAVING, BODY, GROWING = "serve.respond", "serve.leaving", "serve.body", "serve.growing"
DROP = "serve.drop"
STILL = "still"  # of the scope's state: raises where the key may not ask for this any more

"""HTTP/1.1 on asyncio protocols, under the gateway and the load tester; and a client for the command line."""

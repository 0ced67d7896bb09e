"""A server with OpenAI's interface as a system of a comparison. Needs aiohttp."""

from collections.abc import Mapping
from typing import Any

from bullet_graph.serve.client import OpenAiServer
from bullet_graph.slo import Slo


class ServerSystem(OpenAiServer):
    """A running server, whose settings and figures are its own."""

    async def configure(self, setting: str, slo: Slo) -> None:
        """Do nothing: a server keeps its settings."""

    def counters(self) -> Mapping[str, Any]:
        """Empty: a server reports none."""
        return {}

"""The front of several engines on one host, before engines that are faked."""

from unittest.mock import Mock

import pytest

from bullet_graph.cli import replicas
from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError
from bullet_graph.serve.settings import ServeSettings


def test_engines_have_room_for_what_the_front_lets_in_and_its_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Mock()
    start = Mock(side_effect=[(connection, Mock()), ConfigError("one is enough here")])
    monkeypatch.setattr(replicas, "start_process", start)
    front = ServeSettings(served_model_name="tiny", max_connections=1, max_headers=2, max_header_bytes=100)
    config = EngineConfig(model="tiny", device="cpu")
    with pytest.raises(ConfigError, match="one is enough"):
        replicas.serve_replicas(2, config, front, Mock(), Mock(), access_log=False, warmup=False)
    behind = connection.send.call_args.args[0].settings
    assert behind.max_connections > front.max_connections + 1000
    # Host, X-Forwarded-For, Content-Length and Content-Type may come on top.
    assert behind.max_headers >= front.max_headers + 4
    assert behind.max_header_bytes >= front.max_header_bytes + 1000

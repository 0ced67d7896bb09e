"""What each step of the experiment came to: works or fails, the exact error, the time; written as it goes."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ERROR_CHARS = 500


@dataclass
class StepLog:
    """Steps of one process, in a file that is complete after each of them: a later one may end the process.

    Attributes:
        path: of the JSON file.
        steps: ``{"step", "works", "seconds"}`` with ``"error"`` or ``"detail"``.
    """

    path: Path
    steps: list[dict[str, Any]] = field(default_factory=list)

    def run(self, step: str, action: Callable[[], Any]) -> Any:
        """What ``action`` returns, None if it fails; a dict, or a tuple's last dict, is kept as the step's detail.

        A step is left out of the file's truth at no time: it stands as failing while it runs.
        """
        entry: dict[str, Any] = {"step": step, "works": False, "error": "the process ended here"}
        self.steps.append(entry)
        self._write()
        start = time.perf_counter()
        result = None
        try:
            result = action()
            detail = result[-1] if isinstance(result, tuple) else result
            works = not (isinstance(detail, dict) and detail.get("works") is False)
            entry |= {"works": works, "error": None if works else "see detail"}
            if isinstance(detail, dict):
                entry["detail"] = detail
        except Exception as error:  # the next step may still tell something
            entry["error"] = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
        entry["seconds"] = round(time.perf_counter() - start, 4)
        self._write()
        return result

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.steps), encoding="utf-8")


def mean_ms(action: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one call, over so many."""
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return round(1e3 * (time.perf_counter() - start) / repeats, 4)

"""What a child process is to do, as it travels on the command line, and the files that processes share."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Role = Literal["save", "load", "masks", "pool"]
ROLES: tuple[Role, ...] = get_args(Role)
ROWS = (64, 56, 48)
"""Batch sizes that are saved; the first is the one that is rebuilt."""
TRITON = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process.

    Attributes:
        role: what it does.
        work: folder that the processes share.
        layers: of the model.
        images: a saving process: keep the cubins of all modules. A loading one: take all functions from cubins;
            otherwise those of libraries from modules that warm-up launches load.
        costs: measure step F, too.
    """

    role: Role
    work: Path
    layers: int = 0
    images: bool = False
    costs: bool = False

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self) | {"work": str(self.work)})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """The job of :meth:`to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**(fields | {"work": Path(fields["work"])}))

    @property
    def name(self) -> str:
        """Of the process in the results."""
        layers = f" {self.layers} layers" if self.layers else ""
        way = f" by {'images' if self.images else 'triggers'}" if self.role == "load" else ""
        return f"{self.role}{layers}{way}"

    @property
    def log(self) -> Path:
        """The file of its steps."""
        return self.work / f"{self.name.replace(' ', '_')}.json"

    def graph_file(self, name: str | int) -> Path:
        """The saved graph of a batch size, or of :data:`TRITON`."""
        return self.work / f"graph_{self.layers}_{name}.json"

    @property
    def meta_file(self) -> Path:
        """What else the loading process must know."""
        return self.work / f"meta_{self.layers}.json"

    @property
    def image_folder(self) -> Path:
        """Cubins."""
        return self.work / "images"

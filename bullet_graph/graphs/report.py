"""What capturing graphs cost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing cost.

    Attributes:
        num_graphs: captured.
        compile_seconds: torch.compile, once for all of them.
        capture_seconds: everything else.
        num_bytes: device memory that is gone since, workspaces allocated on the way included.
    """

    num_graphs: int
    compile_seconds: float
    capture_seconds: float
    num_bytes: int

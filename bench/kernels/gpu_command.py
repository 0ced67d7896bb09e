"""What the commands of this folder have in common."""

from typing import Any

import click
import torch

from bullet_graph.cli.exits import EXIT_ERROR
from bullet_graph.errors import BulletGraphError, DeviceError


class _Refusal(click.ClickException):
    exit_code = EXIT_ERROR


class GpuCommand(click.Command):
    """A command that needs a GPU; the package's own errors become one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run, if there is a GPU."""
        try:
            require_gpu()
            return super().invoke(ctx)
        except BulletGraphError as error:
            raise _Refusal(str(error)) from error


def require_gpu() -> None:
    """Make sure that torch can use a GPU.

    Raises:
        DeviceError: it cannot.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            f"this benchmark needs a GPU, but torch {torch.__version__} sees no CUDA device: check `nvidia-smi` and "
            "that torch is a CUDA build"
        )

"""What the commands of this folder have in common."""

from typing import Any

import click
import torch

from bullet_graph.cli.exits import EXIT_ERROR
from bullet_graph.cli.options import parse_sizes
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.errors import BulletGraphError, DeviceError


def parse_block_rows(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """An option's callback: read numbers of rows such as ``512,1024``, which fill the cache's blocks; or none."""
    rows = parse_sizes(context, parameter, value)
    if any(number <= 0 or number % KV_BLOCK_TOKENS for number in rows):
        raise click.BadParameter(
            f"{value!r}: write positive multiples of {KV_BLOCK_TOKENS}, such as 512,1024"
        )
    return rows


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

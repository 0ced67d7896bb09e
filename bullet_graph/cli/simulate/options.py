"""Options of the commands that run an engine in virtual time."""

from collections.abc import Callable

import click

from bullet_graph.cli.options import parse_size


def capacity_options(*, max_num_seqs: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command ``max_num_seqs``, ``max_num_batched_tokens``, ``max_model_len`` and ``kv_cache_bytes``.

    Args:
        max_num_seqs: the command's default.
    """
    options = (
        click.option(
            "--max-num-seqs",
            type=int,
            default=max_num_seqs,
            show_default=True,
            help="Most sequences running at once.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=int,
            default=8192,
            show_default=True,
            help="Most tokens of one forward.",
        ),
        click.option("--max-model-len", type=int, help="Most tokens of a prompt and its output together."),
        click.option(
            "--kv-cache-bytes",
            metavar="SIZE",
            callback=parse_size,
            help="Size of the KV cache, such as 8GiB.  [default: what memory is left]",
        ),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate

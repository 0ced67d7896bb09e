"""``bullet-graph capture``: the group; each command is in a file of its own."""

import click

from bullet_graph.cli.capture.archive import export, import_
from bullet_graph.cli.capture.build import build
from bullet_graph.cli.capture.explain import explain
from bullet_graph.cli.capture.listing import list_, show, verify
from bullet_graph.cli.capture.plan import plan
from bullet_graph.cli.capture.prune import prune


@click.group()
def capture() -> None:
    """Build, keep, check and ship caches of precomputed captures.

    A cache is code: whoever made it decides what the engine runs. Import and use only what comes from a source
    you trust.

    \b
    Examples:
      bullet-graph capture build --model llama-3.1-8b
      bullet-graph capture list
      bullet-graph capture explain --model llama-3.1-8b
      bullet-graph capture export 3f2a captures.tgz
      bullet-graph capture import captures.tgz --trusted-key fleet.pub
    """


capture.add_command(build)
capture.add_command(explain)
capture.add_command(export)
capture.add_command(import_)
capture.add_command(list_)
capture.add_command(plan)
capture.add_command(prune)
capture.add_command(show)
capture.add_command(verify)

"""The console script ``bullet-graph``."""

import traceback

import click

from bullet_graph._version import __version__
from bullet_graph.cli.bench.command import bench
from bullet_graph.cli.capture.command import capture
from bullet_graph.cli.doctor import doctor
from bullet_graph.cli.exits import EXIT_ERROR, EXIT_INTERRUPTED
from bullet_graph.cli.explain.command import explain
from bullet_graph.cli.generate import generate
from bullet_graph.cli.profile import profile
from bullet_graph.cli.serve import serve
from bullet_graph.cli.simulate.command import simulate
from bullet_graph.errors import BulletGraphError, EngineDeadError


class _ErrorReportingGroup(click.Group):
    """Turns the package's own errors into one line and an exit code; others keep their traceback."""

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
        except BulletGraphError as error:
            if isinstance(error, EngineDeadError) and error.__cause__ is not None:
                # The line alone would hide where a device, or the engine itself, failed.
                traceback.print_exception(error.__cause__)
            click.echo(f"error: {error}", err=True)
            ctx.exit(EXIT_ERROR)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bullet-graph")
def main() -> None:
    """LLM inference with continuous batching, a paged KV cache and CUDA graphs.

    \b
    Examples:
      bullet-graph generate --model ./Llama-3.2-1B --prompt "The sea"
      bullet-graph bench throughput --model tiny --trace synthetic:conv --num-prompts 20
      bullet-graph serve --model ./Qwen3-8B --port 8000
      bullet-graph bench latency --model llama-3.1-8b --batch-size 64
      bullet-graph simulate --trace azure:conv --request-rate 20 --goodput ttft:500 tpot:15
      bullet-graph capture list
      bullet-graph doctor
    """


main.add_command(bench)
main.add_command(capture)
main.add_command(doctor)
main.add_command(explain)
main.add_command(generate)
main.add_command(profile)
main.add_command(serve)
main.add_command(simulate)

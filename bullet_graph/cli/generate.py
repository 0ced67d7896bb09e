"""``bullet-graph generate``: text, or token ids, as they come."""

import sys
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.exits import EXIT_ERROR
from bullet_graph.cli.options import engine_options, fit_max_num_seqs
from bullet_graph.config import EngineConfig
from bullet_graph.errors import PromptError
from bullet_graph.sampling_params import SamplingParams


def parse_ids(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """An option's callback: read each value's token ids, written as ``1,2,3``; an empty text has none."""
    try:
        return tuple(tuple(int(part) for part in value.split(",") if value.strip()) for value in values)
    except ValueError as error:
        raise click.BadParameter(f"write token ids as 1,2,3 ({error})") from error


@click.command()
@engine_options(max_num_seqs=256, max_num_seqs_shown="as many as there are outputs, at most 256")
@click.option("--prompt", "texts", multiple=True, help="A prompt; may be given again.")
@click.option("--prompt-ids", "ids", multiple=True, callback=parse_ids, help="A prompt as token ids: 1,2,3.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with a prompt a line; blank lines are passed over.",
)
@click.option("--chat", is_flag=True, help="Put each text into the model's chat template.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0: the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=-1, show_default=True, help="-1: all tokens.")
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--stop", multiple=True, help="A text that ends the output; may be given again.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token.")
@click.option("--logprobs", type=int, help="So many alternatives a token, with --json.")
@click.option("--n", type=int, default=1, show_default=True, help="Outputs a prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt, as each is done.")
def generate(
    config: EngineConfig,
    texts: tuple[str, ...],
    ids: tuple[tuple[int, ...], ...],
    prompt_file: Path | None,
    chat: bool,
    as_json: bool,
    trace_decisions: Path | None,
    **sampling: Any,
) -> None:
    """Continue prompts, printing text as it comes (token ids where the model has no tokenizer).

    Without --prompt, --prompt-ids and --prompt-file the prompt is all of standard input. Several prompts run
    together and are printed in order; one that is wrong fails alone, and the exit code is then 2.

    \b
    Examples:
      bullet-graph generate --model ./Llama-3.2-1B-Instruct --chat --prompt "Why is the sea salt?"
      bullet-graph generate --model tiny --prompt-ids 1,2,3 --max-tokens 8
      bullet-graph generate --model ./Qwen3-0.6B --prompt-file prompts.txt --json > out.jsonl
    """
    params = SamplingParams(seed=config.seed, **sampling)
    if params.logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json, which has room for them")
    if chat and ids:
        raise click.UsageError("--chat needs texts: --prompt-ids cannot go into a chat template")
    prompts: list[str | tuple[int, ...]] = [*_read_texts(texts, ids, prompt_file), *ids]
    # torch takes seconds to import, and --help must not wait for it.
    from bullet_graph.cli.streaming import run_generate  # noqa: PLC0415

    config = fit_max_num_seqs(config, len(prompts) * params.n)
    accepted = run_generate(
        config, prompts, params, chat=chat, as_json=as_json, trace_decisions=trace_decisions
    )
    if not accepted:
        click.get_current_context().exit(EXIT_ERROR)


def _read_texts(texts: tuple[str, ...], ids: tuple[Any, ...], prompt_file: Path | None) -> list[str]:
    """All text prompts, from standard input where no prompt is given in any other way."""
    prompts = list(texts)
    if prompt_file is not None:
        lines = _decode(prompt_file.read_bytes(), str(prompt_file)).splitlines()
        prompts += [line for line in lines if line.strip()]
        if not prompts and not ids:
            raise PromptError(f"{prompt_file}: at least one line with a prompt is required, found none")
    elif not texts and not ids:
        if sys.stdin.isatty():
            raise click.UsageError("give a prompt: --prompt, --prompt-ids, --prompt-file or standard input")
        prompts = [_decode(sys.stdin.buffer.read(), "standard input").removesuffix("\n")]
    return prompts


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source}: a prompt must be UTF-8 text ({error})") from error

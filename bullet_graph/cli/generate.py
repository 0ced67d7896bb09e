"""``bullet-graph generate``: prints text, or token ids, as they are generated."""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from bullet_graph.cli import EXIT_ERROR
from bullet_graph.cli.engine_run import open_engine, tell_random_weights
from bullet_graph.cli.options import engine_options, fit_max_num_seqs, parse_object, parsed_by
from bullet_graph.config import EngineConfig, parse_counts
from bullet_graph.engine.admission import Prompt
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.errors import LateError, ModelError, PromptError, RequestError
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.runtime.resolve import default_sampling_params, load_tokenizer, resolve
from bullet_graph.sampling_params import SamplingParams

_METRICS = ("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms")


@click.command()
@engine_options(max_num_seqs=256, default_shown="as many as there are outputs, at most 256")
@click.option("--prompt", "texts", multiple=True, help="A prompt; may be given again.")
@click.option(
    "--prompt-ids", "ids", multiple=True, callback=parsed_by(parse_counts), help="A prompt as token ids: 1,2,3."
)
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with one prompt per line; blank lines are skipped.",
)
@click.option("--chat", is_flag=True, help="Put each text into the model's chat template.")
@click.option(
    "--chat-template-kwargs",
    metavar="JSON",
    callback=parse_object,
    help="With --chat: variables of the template, such as '{\"enable_thinking\": false}'.",
)
@click.option("--temperature", default=1.0, help="0: always the most probable token.")
@click.option("--top-p", default=1.0, help="Probability mass to sample from, in (0, 1].")
@click.option("--top-k", default=-1, help="Sample from the K most probable tokens; -1: from all.")
@click.option("--min-p", default=0.0, help="Least probability, relative to the top token's.")
@click.option("--presence-penalty", default=0.0, help="Subtracted from logits of generated tokens, in [-2, 2].")
@click.option("--frequency-penalty", default=0.0, help="The same, once per occurrence.")
@click.option("--repetition-penalty", default=1.0, help="Divides logits of prompt and generated tokens.")
@click.option("--bad-words", multiple=True, help="Text that is not generated; may be given again.")
@click.option("--max-tokens", default=128, help="Most tokens of each output.")
@click.option("--stop", multiple=True, help="Text that ends the output; may be given again.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token.")
@click.option("--logprobs", type=int, help="With --json: alternatives to report for each token.")
@click.option("--prompt-logprobs", type=int, help="With --json: the same for each token of the prompt.")
@click.option("--n", default=1, help="Outputs per prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt, as each finishes.")
def generate(
    config: EngineConfig,
    texts: tuple[str, ...],
    ids: tuple[tuple[int, ...], ...],
    prompt_file: Path | None,
    chat: bool,
    chat_template_kwargs: dict[str, Any] | None,
    as_json: bool,
    trace_decisions: Path | None,
    **sampling: Any,
) -> None:
    """Continue prompts, printing text as it comes (token ids where the model has no tokenizer).

    Without --prompt, --prompt-ids or --prompt-file, the prompt is standard input. Several prompts run together and
    are printed in order. A wrong prompt fails alone; the exit code is then 2. The model's generation_config.json comes
    before the defaults of sampling below.

    \b
    Examples:
      bullet-graph generate --model ./Llama-3.2-1B-Instruct --chat --prompt "Why is the sea salt?"
      bullet-graph generate --model tiny --prompt-ids 1,2,3 --max-tokens 8
      bullet-graph generate --model ./Qwen3-0.6B --prompt-file prompts.txt --json > out.jsonl
    """
    params = SamplingParams(seed=config.seed, **sampling)
    for flag, count in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
        if count is not None and not as_json:
            raise click.UsageError(f"{flag} needs --json, which has room for them")
    if chat and ids:
        raise click.UsageError("--chat needs texts: --prompt-ids cannot go into a chat template")
    if chat_template_kwargs is not None and not chat:
        raise click.UsageError("--chat-template-kwargs needs --chat")
    prompts: list[str | tuple[int, ...]] = [*_read_texts(texts, ids, prompt_file), *ids]
    config = fit_max_num_seqs(config, len(prompts) * params.n)
    runtime, source = resolve(config), click.get_current_context().get_parameter_source
    defaults = default_sampling_params(config, runtime)
    own = {name: value for name, value in defaults.items() if source(name) is ParameterSource.DEFAULT}
    params, tokenizer = dataclasses.replace(params, **own), load_tokenizer(runtime)
    inputs: list[Prompt] = list(prompts)
    if chat:
        inputs = [_apply_template(str(text), tokenizer, chat_template_kwargs) for text in prompts]
    with open_engine(config, quiet=as_json, trace_decisions=trace_decisions) as engine:
        all_accepted = _run(engine, prompts, inputs, params, as_json)
    tell_random_weights(config)
    if not all_accepted:
        click.get_current_context().exit(EXIT_ERROR)


def _read_texts(texts: tuple[str, ...], ids: tuple[Any, ...], prompt_file: Path | None) -> list[str]:
    """All text prompts; from standard input where none is given in another way."""
    prompts = list(texts)
    if prompt_file is not None:
        text = _decode(prompt_file.read_bytes(), str(prompt_file)).replace("\r\n", "\n")
        prompts += [line for line in text.split("\n") if line.strip()]
        if not prompts and not ids:
            raise PromptError(f"{prompt_file}: at least one line with a prompt is required, found none")
    elif not texts and not ids:
        prompts = ["" if sys.stdin.isatty() else _decode(sys.stdin.buffer.read(), "standard input").removesuffix("\n")]
        if prompts == [""]:
            raise PromptError("found no prompt: give --prompt, --prompt-ids, --prompt-file or text on standard input")
    return prompts


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source}: a prompt must be UTF-8 text ({error})") from error


class OrderedPrinter:
    """Prints concurrent streams one after the other: the first unfinished one as it comes, the others in their turn.

    Each stream has a heading of its own, unless it is the only one.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._waiting = [f"=== {label}\n" for label in labels] if len(labels) > 1 else [""] * len(labels)
        self._ended = [False for _ in labels]
        self._current = 0
        click.echo("".join(self._waiting[:1]), nl=False)

    def push(self, stream: int, text: str) -> None:
        """Add text to a stream."""
        if stream == self._current:
            click.echo(text, nl=False)
        else:
            self._waiting[stream] += text

    def end(self, stream: int) -> None:
        """End a stream."""
        self._ended[stream] = True
        while self._current < len(self._ended) and self._ended[self._current]:
            self._current += 1
            click.echo("".join(["\n", *self._waiting[self._current : self._current + 1]]), nl=False)


def _run(
    engine: Engine, prompts: Sequence[Prompt], inputs: Sequence[Prompt], params: SamplingParams, as_json: bool
) -> bool:
    """Generate from inputs, print under their prompts, and return whether every one was accepted."""
    kind = OutputKind.FINAL_ONLY if as_json else OutputKind.DELTA
    accepted = []
    for index, prompt in enumerate(inputs):
        try:
            engine.add_request(str(index), prompt, params, output_kind=kind)
            accepted.append(index)
        except (RequestError, LateError) as error:
            if len(prompts) == 1:
                raise
            click.echo(f"error: prompt {index + 1}: {error}", err=True)
            if as_json:
                click.echo(json.dumps({"request_id": str(index), "error": str(error)}))
    if as_json:
        while engine.has_unfinished_requests():
            for output in engine.step():
                click.echo(json.dumps(_to_json(output, prompts[int(output.request_id)]), allow_nan=False))
    else:
        streams = [(index, sample) for index in accepted for sample in range(params.n)]
        numbers = {stream: number for number, stream in enumerate(streams)}
        printer = OrderedPrinter([_label(prompts[i], i, sample, params.n) for i, sample in streams])
        while engine.has_unfinished_requests():
            for output in engine.step():
                for completion in output.outputs:
                    number = numbers[int(output.request_id), completion.index]
                    ids = completion.token_ids
                    printer.push(number, completion.text if engine.tokenizer else "".join(f"{n} " for n in ids))
                    if completion.finish_reason is not None:
                        printer.end(number)
    return len(accepted) == len(prompts)


def _apply_template(prompt: str, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any] | None) -> list[int]:
    if tokenizer is None:
        raise ModelError("--chat needs a model folder with tokenizer.json and a chat template: found none")
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], template_kwargs=template_kwargs)
    # The template contains the special tokens.
    return tokenizer.encode(text, add_special_tokens=False)


def _label(prompt: Prompt, index: int, sample: int, num_samples: int) -> str:
    text = prompt if isinstance(prompt, str) else ", ".join(map(str, prompt))
    shown = textwrap.shorten(text, 60, placeholder="…")
    of_samples = f", output {sample + 1} of {num_samples}" if num_samples > 1 else ""
    return f"prompt {index + 1}{of_samples}: {shown}"


def _to_json(output: RequestOutput, prompt: Prompt) -> dict[str, Any]:
    told = dataclasses.asdict(output)
    return {
        "request_id": output.request_id,
        "prompt": prompt if isinstance(prompt, str) else None,
        **{name: told[name] for name in ("prompt_token_ids", "prompt_logprobs", "outputs")},
        "metrics": {name: getattr(output.metrics, name) for name in _METRICS},
        "error": None,
    }

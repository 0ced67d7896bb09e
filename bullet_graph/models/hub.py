"""Models of the Hugging Face hub, which ``huggingface_hub`` downloads into its cache, by its own settings and token."""

import re
from pathlib import Path

from bullet_graph.errors import ModelError

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
_NOT_NEEDED = ["*/*.safetensors", "consolidated*"]
"""Weights in subfolders, and Mistral's second copy of the weights."""

_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, ``OWNER/NAME``."""
    return _REPO_ID.fullmatch(name) is not None


def download(repo_id: str, revision: str | None, *, weights: bool = False) -> Path:
    """The folder in the hub's cache that holds a model's files at its top level, downloaded where they are missing.

    The folder's name is the commit that ``revision`` (None: the main branch) stands for. Without ``weights`` it need
    not hold them. Raises ModelError where the files cannot be had.
    """
    # It takes half a second to import, and most models are folders.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    command = f"hf download {repo_id}" + ("" if revision is None else f" --revision {revision}")
    wanted = [*_SMALL_FILES, *(_WEIGHTS if weights else ())]
    try:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=wanted, ignore_patterns=_NOT_NEEDED))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo_id} is gated: ask for access on its page of the hub, log in with `hf auth login`, then run "
            f"`{command}`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {repo_id} here, and the hub shows no such model: check the name; if it is private, "
            f"log in with `hf auth login`, then run `{command}`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{repo_id} has no revision {revision!r}: give a branch, a tag or a commit of it; `hf download {repo_id}` "
            "takes the main branch"
        ) from error
    except Exception as error:  # The library passes on errors of HTTP, of its cache and of the disk.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
        raise ModelError(
            f"there is no folder {repo_id} here, and the hub's files of that name cannot be had: run `{command}` where "
            f"the hub can be reached ({reason})"
        ) from error
    for pattern in ("config.json", *(_WEIGHTS[:1] if weights else ())):
        if not any(folder.glob(pattern)):
            raise ModelError(
                f"{repo_id} on the hub must hold {pattern} at its top level, and does not: give a repository of "
                "Hugging Face's format with safetensors (GGUF files and .bin weights are not read)"
            )
    return folder

"""Fetching a model of the Hugging Face hub, with errors that say what to do."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from octavo.ir.errors import OctavoError

# "name" or "organisation/name", as the hub allows them.
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_SMALL_FILES = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model", "*.tiktoken"]
_WEIGHTS = ["model*.safetensors"]


def is_model_id(text: str) -> bool:
    """Whether `text` can be the name of a model of the hub (and is not plainly a path)."""
    return bool(_MODEL_ID.fullmatch(text)) and not text.endswith((".gguf", ".json", ".safetensors"))


def fetch_snapshot(model_id: str, revision: str | None, *, with_weights: bool) -> Path:
    """The local directory of a model, downloaded if it is not in the cache yet.

    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are honoured, by huggingface_hub. The directory is named
    by the commit. Raises OctavoError: not found, gated, no such revision, offline and not cached,
    no network.
    """
    patterns = _SMALL_FILES + (_WEIGHTS if with_weights else [])
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise OctavoError(
            f"{model_id} is gated: accept its terms on the hub, then log in (hf auth login) or"
            " set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise OctavoError(f"{model_id} has no revision '{revision}' on the hub") from None
    except RepositoryNotFoundError:
        raise OctavoError(
            f"'{model_id}' is neither a path here nor a model of the hub (a private one needs"
            " HF_TOKEN)"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise OctavoError(_unreachable(model_id)) from None
    except Exception as error:
        # The HTTP client's errors too, whose package changes with the version of huggingface_hub.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OctavoError(f"{model_id} cannot be downloaded: {reason}") from error


def _unreachable(model_id: str) -> str:
    if constants.is_offline_mode():
        return (
            f"'{model_id}' is neither a path here nor in the hub's cache, and HF_HUB_OFFLINE is"
            " set; unset it to download the model"
        )
    return (
        f"'{model_id}' is neither a path here nor in the hub's cache, and the hub cannot be"
        " reached; check the network, or give a directory or a .gguf file"
    )

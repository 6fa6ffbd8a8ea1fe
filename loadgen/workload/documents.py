"""Texts to talk about that need no download: the documentation in Python's standard library, or a user's file.

Docstrings of the standard library are read from the source files with `ast`. So no module is imported, and the same
Python always gives the same text.
"""

from __future__ import annotations

import ast
import functools
import math
import sysconfig
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from textwrap import TextWrapper

from loadgen.workload.conversations import BadWorkload

# Modules with 10,000 characters of docstrings or more come first, then shorter well-known ones.
MODULES = tuple(
    """
    typing logging/__init__ difflib inspect ipaddress unittest/mock xml/etree/ElementTree statistics tarfile threading
    http/cookiejar unittest/case email/message mailbox configparser smtplib codecs _pydecimal pdb urllib/request
    http/server shutil imaplib collections/__init__ doctest ssl datetime subprocess urllib/parse socketserver traceback
    zipfile enum pathlib http/client argparse json/__init__ ftplib socket asyncio/tasks random uuid fractions functools
    contextlib textwrap tempfile calendar queue heapq
    """.split()
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text that a conversation is about."""

    title: str
    text: str
    topics: tuple[str, ...]  # names or passages to ask about


def documents(path: Path | None, number: int, length: int) -> list[Document]:
    """Return up to `number` documents of about `length` characters, from the file `path` or the standard library.

    Raises BadWorkload.
    """
    return stdlib_documents(number, length) if path is None else file_documents(path, length)[:number]


def stdlib_documents(count: int, length: int) -> list[Document]:
    """Return documents from the docstrings of the standard library, one each of the first `count` usable modules.

    Modules are taken in the order of the list MODULES, with up to `length` characters of each. Raises BadWorkload if
    none is usable, as in a Python whose sources or docstrings were removed.
    """
    documents = list(islice(filter(None, (_module_document(module, length) for module in MODULES)), count))
    if not documents:
        raise BadWorkload("this Python carries no documentation in its standard library; give a text file instead")
    return documents


@functools.cache
def _module_document(module: str, length: int) -> Document | None:
    path = Path(sysconfig.get_path("stdlib"), f"{module}.py")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return None
    title = module.removesuffix("/__init__").removeprefix("_py").replace("/", ".")
    parts, topics, size = [f"# {title}\n\n{ast.get_docstring(tree) or ''}"], [], 0
    for name, signature, text in _entries(tree, title):
        parts.append(f"## {signature}\n\n{text}")
        if not name.rpartition(".")[2].startswith("_"):
            topics.append(name)
        size += len(parts[-1])
        if size > length:
            break
    if len(topics) < 4:
        return None
    return Document(title, "\n\n".join(parts)[:length], tuple(topics))


def _entries(tree: ast.Module, title: str):
    """Yield (name, signature, docstring) of each documented class, method and function of a module.

    `title`: the module's name, with which the names begin.
    """
    for node in tree.body:
        name, inside = title, [node]
        if isinstance(node, ast.ClassDef):
            name, inside = f"{title}.{node.name}", node.body
            if text := ast.get_docstring(node):
                yield name, f"class {name}", text
        for one in inside:
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(one)):
                yield f"{name}.{one.name}", f"{name}.{one.name}({ast.unparse(one.args)})", text


def file_documents(path: Path, length: int) -> list[Document]:
    """Cut a text file at paragraphs into documents of about `length` characters. Raises BadWorkload."""
    text = read_text(path)
    cut = TextWrapper(length, expand_tabs=False, replace_whitespace=False, break_on_hyphens=False)
    paragraphs = [piece for part in text.split("\n\n") for piece in cut.wrap(part.strip())]
    documents: list[list[str]] = []
    size = math.inf
    for paragraph in paragraphs:
        if size + len(paragraph) > length:
            documents.append([])
            size = 0
        documents[-1].append(paragraph)
        size += len(paragraph) + 2
    if not documents:
        raise BadWorkload(f"{path}: the file holds no text; name a UTF-8 text")
    return [_passages(f"{path.name}, part {number}", part) for number, part in enumerate(documents, 1)]


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises BadWorkload."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadWorkload(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise BadWorkload(f"{path}: {error.strerror}; name a UTF-8 text") from None


def _passages(title: str, paragraphs: list[str]) -> Document:
    topics = tuple(f"the passage that begins “{' '.join(paragraph.split()[:8])}”" for paragraph in paragraphs)
    return Document(title, "\n\n".join(paragraphs), topics)

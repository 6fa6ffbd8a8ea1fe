"""Checks of `hitherto doctor` on a model's files: its tokenizer and its chat template."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from gateway.model import folder_here, model_dir
from gateway.ops.trial import WORDS, Finding
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.report import template_report
from gateway.settings import ConfigError, Settings
from replicas.adopt import Facts
from replicas.served import base_names


def check_model(
    settings: Settings, facts: list[Facts], one_of_several: bool = False
) -> tuple[str, Path | None, Finding]:
    """Return the name by which the replicas serve the model, its folder or None, and a finding.

    `one_of_several`: whether other models are checked as well; --model then holds for those without a folder here.
    """
    if one_of_several and settings.model and (here := next((one.root for one in facts if folder_here(one.root)), None)):
        # as the gateway does with models that --model is not for
        settings = settings.model_copy(update={"model": here})
    names = [name for one in facts for name in base_names(one.models)]
    launched = [settings.profile] if settings.launch else [pool.profile for pool in settings.pools.values()]
    simulated = launched[:1] == ["sim"]
    wanted = settings.model or (names[0] if names else "sim" if simulated else None)
    served = settings.served_model_name or (names[0] if names else wanted and Path(wanted).name) or "model"
    roots = () if settings.model else (one.root for one in facts)
    try:
        directory = model_dir(*roots, wanted)
    except ConfigError as error:
        return served, None, Finding("fail", "model", f"prompts would be matched as text, not as tokens: {error}")
    return served, directory, Finding("ok", "model", f"{served}, tokenizer and template from {directory}")


def check_prompts(
    settings: Settings, directory: Path, served: str, facts: list[Facts]
) -> tuple[Pipeline | None, list[Finding]]:
    """Return the pipeline that makes the model's prompts, and findings; None if its files cannot be used."""
    from gateway.prompt.tokens.model import ModelError
    from gateway.prompt.tokens.tokenizer import TokenizerError

    size = settings.block_size or next((one.block_size for one in facts if one.block_size), 16)
    try:
        pipeline = Pipeline(directory, served, size, chat_template=settings.chat_template)
    except (ModelError, TokenizerError) as error:
        return None, [
            Finding("fail", "tokenizer", str(error), "give --model a folder that holds the model's tokenizer.json")
        ]
    pipeline.follow(next((one.dialect.version_quirks(one.version) for one in facts if one.version), {}))
    return pipeline, [_tokenizer(pipeline), *_files(pipeline), *_template(pipeline)]


def _tokenizer(pipeline: Pipeline) -> Finding:
    if pipeline.tokenizer is None:
        return Finding("warn", "tokenizer", f"{pipeline.template_error}: prompts are matched as text",
                       "nothing to mend if the engine reads this model without tokenizer.json; else give --model a folder that has one")  # fmt: skip
    text = " ".join(WORDS * 70)[:8192]
    begun = time.perf_counter()
    ids = pipeline.tokenizer.encode(text)
    took = f"8 kB in {1e3 * (time.perf_counter() - begun):.2f} ms, {len(ids) // 4} tokens"
    if pipeline.tokenizer.backend == "fastokens":
        return Finding("ok", "tokenizer", f"fastokens, {took}")
    return Finding("warn", "tokenizer", f"{pipeline.tokenizer.backend}, {took}: fastokens cannot load this one",
                   "it works, at about 40 times the cost for each prompt")  # fmt: skip


def _files(pipeline: Pipeline) -> Iterator[Finding]:
    """Yield what the model's files say about prompts that may not be exact."""
    reading = pipeline.reading
    if reading is not None and (doubt := pipeline.inexact()):
        yield Finding("warn", "tokenizer files", f"{doubt}: prompts are matched as text unless the engine's own tokens decide it",
                      "let the gateway ask the engine's /tokenize; the replica's line below says what it answered")  # fmt: skip
    elif reading is not None and reading.rebuilt:
        yield Finding(
            "ok", "tokenizer files", f"transformers does not use tokenizer.json as it is: it is {reading.how}, here too"
        )
    if not pipeline.inexact() and not pipeline.must_be_shown and (why := pipeline.inexact_chat()):
        yield Finding("warn", "chats", f"{why}: they are matched as text", "run a newer version of the engine")
    if pipeline.media.images is not None:
        yield Finding(
            "ok",
            "media",
            "images that are written in a request are exact; what is at a URL, sound and video are so up to where they begin",
        )
    elif pipeline.takes_media:
        yield Finding("warn", "media", "the model takes more than text: prompts with media are exact up to the first item, and by text from there on",
                      "nothing to mend; hitherto_media_prompts_total counts them, hitherto explain shows one")  # fmt: skip


def _template(pipeline: Pipeline) -> list[Finding]:
    report = template_report(pipeline)
    if report.refused and pipeline.tokenizer is None:
        return []  # said with the tokenizer
    if report.refused:
        return [Finding("fail", "chat template", f"a plain conversation cannot be rendered: {report.refused}",
                        "give --chat-template the file the engines were started with")]  # fmt: skip
    how = (
        f"by Jinja each time ({report.not_compiled})" if report.not_compiled else "compiled, and checked against Jinja"
    )
    reuse = (
        f"known prefixes end at any of {report.cuts} special tokens" if report.cuts else "nothing of a prompt is reused"
    )
    findings = [Finding("ok", "chat template", f"renders {how}; {reuse}")]
    if report.prints_time:
        findings.append(Finding("warn", "time in the prompt", "the template prints the time of the day in some conversations: their cache ends there",
                                "nothing to mend in the gateway; a template without the time would keep its cache"))  # fmt: skip
    elif report.prints_date:
        findings.append(Finding("warn", "date in the prompt", "the template prints the date: every cached prefix is new after midnight",
                                "nothing to mend in the gateway; a template without the date would keep its cache"))  # fmt: skip
    for turn in report.turns:
        name = "turn by turn" if turn.what == "plain" else f"turns {turn.what}"
        if turn.extends:
            findings.append(Finding("ok", name, "each turn extends the one before, so its cache can be used"))
        else:
            findings.append(Finding("warn", name, f"the second turn keeps only {turn.kept} of the first one's {turn.total} tokens",
                                    "the template rewrites earlier turns; hits end there on any router. Nothing to mend in the gateway"))  # fmt: skip
    return findings

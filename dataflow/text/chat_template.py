"""Chats as text: a Jinja template in a sandbox, and which parts of the text are the assistant's.

Templates are those of Hugging Face's models, rendered as `transformers` does it (a test compares), with three
differences: a rendering has bounds (`template_bounds`), `strftime_now` is not there, because the text of a
chat must not depend on the day, and what a dataset holds reaches the template as plain JSON values. A
template marks what the assistant says by `{% generation %}` ... `{% endgeneration %}`. One without these
marks is rendered up to each turn of the assistant and through it, which tells where the turn lies as long as
what follows leaves it as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataflow.text.tokenizer import MissingTextSupportError, read_regular
from sharding.cached_property import cached_property

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TRACE = "_trace"
"""The variable that brings a rendering's own lists to the marks in the template."""
Messages = Sequence[Mapping[str, Any]]


class RenderedChat(NamedTuple):
    """The text of a chat."""

    text: str
    spans: list[tuple[int, int]]
    """Begin and end of each of the assistant's parts, in characters; ascending."""


class ChatText:
    """Renders chats. Pickles as the template's source; threads may use it at the same time.

    Args:
        source: Jinja.
        variables: what the template gets besides `messages` and `tools`, as JSON values.

    Raises `ValueError` for a source that is no template, and `MissingTextSupportError`.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source, self.variables = source, dict(variables)
        self._template  # noqa: B018 - raises for one that is none

    @cached_property
    def _template(self) -> Any:
        try:
            return compiled(self.source)
        except ImportError as error:
            raise MissingTextSupportError("a chat template", error) from error

    def rendered(self, messages: Messages, tools: Any = None) -> RenderedChat:
        """The text of a chat. Raises `ValueError` where its turns cannot be told, and what Jinja raises."""
        spans: list[tuple[int, int]] = []
        text = self._text(messages, tools, spans)
        if not _MARKED.search(self.source):
            spans = [
                self._turn(messages, tools, turn, text)
                for turn, message in enumerate(messages)
                if message["role"] == "assistant"
            ]
        return RenderedChat(text, spans)

    def _text(
        self, messages: Messages, tools: Any, spans: list[tuple[int, int]], prompt: bool = False
    ) -> str:
        blocks: list[str] = []
        from dataflow.text.template_bounds import bounded

        context = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        template = self._template
        with bounded((messages, tools)):
            # One block at a time, so that a mark knows how much text there is before it.
            for block in template.generate(**context, **self.variables, **{_TRACE: (blocks, spans)}):
                blocks.append(block)  # noqa: PERF402
        return "".join(blocks)

    def _turn(self, messages: Messages, tools: Any, turn: int, text: str) -> tuple[int, int]:
        """Return where an assistant's turn lies, from what comes before it to the end of what is with it."""
        before = self._text(messages[:turn], tools, [], prompt=True)
        through = self._text(messages[: turn + 1], tools, [])
        if not (text.startswith(through) and through.startswith(before)):
            raise ValueError(
                f"the template does not tell where message {turn}, of the assistant, lies: that depends on "
                "what follows. Put {% generation %} and {% endgeneration %} around what the assistant says"
            )
        return len(before), len(through)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "variables": self.variables}


def compiled(source: str) -> Any:
    """A template, in a sandbox of its own. `ValueError` where it is none, `ImportError` without Jinja."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols

    from dataflow.text.template_bounds import BoundedEnvironment

    class Generation(Extension):
        """Notes where the text inside its marks begins and ends."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser: Any) -> Any:
            """See Jinja's `Extension`."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("record", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def record(self, context: Any, caller: Any) -> str:
            """Return what is inside the marks."""
            text, (blocks, spans) = str(caller()), context[_TRACE]
            begin = sum(map(len, blocks))
            spans.append((begin, begin + len(text)))
            return text

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.bound_filters()
    environment.globals["raise_exception"] = raise_exception
    return environment.compiled(source)


def template_of(
    folder: Path, template: str | os.PathLike[str] | None, variables: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The template's source, and its variables with the special tokens of the model in a folder.

    Args:
        folder: where `tokenizer_config.json` and `chat_template.jinja` may be.
        template: source, or the path of a file with it; None: the model's own.
        variables: what comes before those of the model.

    Raises `ValueError` where there is no template.
    """
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(read_regular(config_file)) if config_file.exists() else {}
    tokens = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
    variables = {name: token for name, token in tokens.items() if token is not None} | dict(variables or {})
    if isinstance(template, os.PathLike):
        return read_regular(Path(template)).decode(), variables
    if template is not None:
        return template, variables
    if template_file.exists():
        return read_regular(template_file).decode(), variables
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ValueError(f"there is no chat template in {folder}: pass template=")
    return source, variables


def _token(value: object) -> str | None:
    """A special token, as a config has it."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None

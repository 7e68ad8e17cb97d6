"""Checks at planning time that the chat template supports what the job passes to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_raybatch.bounded import read_regular_file, within
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.chat import is_template_text
from prefect_raybatch.job.checks import missing_path, nearest
from prefect_raybatch.model import pinned as models
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.request import PromptSpec
from prefect_raybatch.storage import Store, is_remote, join, open_store

if TYPE_CHECKING:
    import jinja2
    from jinja2.runtime import Context

TEMPLATE_SECONDS = 20.0  # to render a prompt; usual templates take about 0.1 ms
MOST_EXPONENT = 1000
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 16 << 20


def template_text(given: str) -> str:
    """Return the text of a chat template; `given` is the text or the name of its file.

    Raises `ConfigError` for an unreadable file or an invalid template.
    """
    text = given if is_template_text(given) else _read(given)
    _parsed(text, "prompt.chat_template" if text == given else f"prompt.chat_template: {given}")
    return text


def check_template(prompt: PromptSpec, request: ModelRequest, model: models.PinnedModel) -> None:
    """Raise `ConfigError` if the chat template does not support what the job passes to it.

    This is the job's template, or else the model's. `model` is the result of `pinned.pin`. Nothing
    is checked if the model's template cannot be read here, e.g. because it is on Hugging Face
    (`_of_model`).
    """
    fields = needing(prompt)
    where = "prompt.chat_template"
    text = prompt.chat_template
    if text is None and (fields or not is_remote(str(model["source"]))):
        where = f"the chat template of {model['source']}"
        text = _of_model(prompt, request, model)
    if text:
        _check_ends(text, where, prompt)
    if text is None or not fields:
        return
    if not text:
        raise ConfigError(no_template(fields, str(model["source"])))
    try:
        names = _names(text)
    except ConfigError:  # of a model's own template, which transformers may accept
        return
    for name in prompt.chat_template_kwargs:
        if name not in names:
            raise ConfigError(
                f"prompt.chat_template_kwargs: {where} has no variable {name!r}"
                f"{nearest(name, names)}"
            )
    for name, given in (("tools", prompt.tools), ("documents", prompt.documents)):
        if given and name not in names:
            raise ConfigError(
                f"prompt.{name}: {where} ignores {name}. Set prompt.chat_template to one that "
                "uses them, or choose another model"
            )


def _check_ends(text: str, where: str, prompt: PromptSpec) -> None:
    """Raise `ConfigError` if rendering two short messages takes too long or gives a huge text.

    `text` is the template, and `where` names it in the error. Other errors in rendering are
    ignored: the template may only refuse these two messages, or need a function of transformers.
    """
    import jinja2

    def render() -> None:
        content: object = "u"
        if prompt.images is not None:
            content = [{"type": "image"}, {"type": "text", "text": "u"}]
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
        # With the variables that transformers passes; any others are undefined.
        _environment(checked=True).from_string(text).render(
            messages=messages,
            add_generation_prompt=True,
            tools=prompt.tools,
            documents=None,
            **prompt.chat_template_kwargs,
        )

    try:
        within(TEMPLATE_SECONDS, render, stop=True)
    except TimeoutError:
        raise ConfigError(
            f"{where}: two short messages take over {TEMPLATE_SECONDS:g} s to render. Remove all "
            "loops except those over messages"
        ) from None
    except TemplateTooLarge as error:
        raise ConfigError(f"{where}: {error}. A chat template must make a short text") from None
    except (jinja2.TemplateError, ArithmeticError, TypeError, ValueError, LookupError, MemoryError):
        return  # the fault of these messages, or a function that only transformers defines
    except (AttributeError, RecursionError):
        return


def needing(prompt: PromptSpec) -> tuple[str, ...]:
    """Return the names of the job's prompt fields that only a chat template can apply."""
    fields = {
        "messages": prompt.messages,
        "chat_template_kwargs": prompt.chat_template_kwargs,
        "continue_final_message": prompt.continue_final_message,
        "tools": prompt.tools,
        "documents": prompt.documents,
    }
    return tuple(f"prompt.{name}" for name, value in fields.items() if value)


def no_template(fields: tuple[str, ...], model: str) -> str:
    """Return the error message for a model that lacks the chat template which `fields` need."""
    return (
        f"{fields[0]}: {model} has no chat template, which this field needs. Set "
        "prompt.chat_template to a Jinja file or text"
    )


def _read(name: str) -> str:
    folder, _, file = name.rpartition("/")
    try:
        if is_remote(name):
            data = open_store(folder).read(file, MAX_TEMPLATE_BYTES)
        else:
            data = read_regular_file(join(name), MAX_TEMPLATE_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not is_remote(name):
            raise ConfigError(
                f"prompt.chat_template: {missing_path(name)}. Check the path, or write the "
                "template's text"
            ) from None
        raise ConfigError(
            f"prompt.chat_template: {name!r} cannot be read ({error}). Name a Jinja file, or write "
            "the template's text"
        ) from None
    if len(data) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"prompt.chat_template: {name!r} has more than {MAX_TEMPLATE_BYTES:,} bytes. Shorten it"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt.chat_template: {name!r} is not UTF-8 text: {error}") from None


def _of_model(prompt: PromptSpec, request: ModelRequest, model: models.PinnedModel) -> str | None:
    """Return the model's chat template; "" if it has none, None if it cannot be determined.

    Reads files only if the tokenizer is in a local folder, or is the model's own in an object
    store. Returns None for any other place, such as Hugging Face.
    """
    extra, source = request.vllm_arguments, str(model["source"])
    if extra.get("tokenizer"):
        if is_remote(extra["tokenizer"]) or not Path(extra["tokenizer"]).is_dir():
            return None
        store = open_store(str(extra["tokenizer"]))
    elif source == models.DEMO or is_remote(source) or Path(source).is_dir():
        store = models.store_of(model)
    else:
        return None
    if prompt.images is not None and (text := _of_processor(store)):
        return text
    return _stored(store, bool(prompt.tools))


def _of_processor(store: Store) -> str | None:
    """Return the chat template of a model's image processor; None if it has none."""
    try:
        value = json.loads(store.read("chat_template.json", MAX_TEMPLATE_BYTES))
        text = value["chat_template"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _stored(store: Store, tools: bool) -> str | None:
    """Return the template that transformers would choose from a tokenizer's files.

    Returns "" if there is none, None if that cannot be determined. `tools`: the job passes tools,
    so a template for tools is preferred.
    """
    files = {file.path for file in store.list()}
    known = {}
    if "tokenizer_config.json" in files:
        try:
            config = json.loads(store.read("tokenizer_config.json", MAX_TOKENIZER_BYTES))
            held = config.get("chat_template")
        except (ValueError, AttributeError):
            return None  # another kind of template, which transformers judges when it is used
        if isinstance(held, list):
            known = {entry["name"]: entry["template"] for entry in held}
        elif held:
            known = {"default": held}
    if "chat_template.jinja" in files:
        known = {"default": _text(store, "chat_template.jinja")}
    more = "additional_chat_templates/tool_use.jinja"
    if more in files:
        known["tool_use"] = _text(store, more)
    if "chat_template.json" in files or not {"tokenizer.json", "tokenizer_config.json"} & files:
        return known.get("default")  # of a processor, or of a tokenizer of another kind
    if tools and "tool_use" in known:
        return str(known["tool_use"])
    return str(known.get("default", ""))


def _text(store: Store, name: str) -> str:
    return store.read(name, MAX_TEMPLATE_BYTES).decode("utf-8", "replace")


def _names(text: str) -> frozenset[str]:
    """Return the names of all variables in a template."""
    from jinja2 import nodes

    return frozenset(node.name for node in _parsed(text, "it").find_all(nodes.Name))


def _parsed(text: str, where: str) -> jinja2.nodes.Template:
    import jinja2

    try:
        return _environment().parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{where}: not a valid Jinja template: line {error.lineno}: {error.message}"
        ) from None


class TemplateTooLarge(Exception):
    """An operation in a chat template makes a value too large for any prompt."""


def _bounded_operation(operator: str, left: object, right: object) -> None:
    """Raise `TemplateTooLarge` if `left` `operator` `right` makes too large a value.

    This is a power, or a text or list repeated many times. No timeout could stop such an operation.
    """
    if operator == "**":
        too_large = isinstance(right, (int, float)) and abs(right) > MOST_EXPONENT
    else:
        pairs = ((left, right), (right, left))
        too_large = any(
            isinstance(times, int)
            and isinstance(value, (str, list, tuple, bytes))
            and len(value) * times > MAX_TEMPLATE_BYTES
            for value, times in pairs
        )
    if too_large:
        raise TemplateTooLarge(f"the operation {operator} makes too large a value")


def _environment(checked: bool = False) -> jinja2.Environment:
    """Return a Jinja environment that renders templates as transformers does.

    It is sandboxed, with loop controls and the generation tag. `checked`: operations that make
    large values raise `TemplateTooLarge`.
    """
    from jinja2 import nodes, parser
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Checked(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(
            self, context: Context, operator: str, left: object, right: object
        ) -> object:
            _bounded_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

    return (Checked if checked else ImmutableSandboxedEnvironment)(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )

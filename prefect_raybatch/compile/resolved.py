"""Resolves a job for one command: reads its files, pins its model, computes its fingerprint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from types import MappingProxyType
from typing import Any

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.distill.classifier import (
    Classifier,
    Training,
    classifier_identity,
    read_file,
)
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import is_web
from prefect_raybatch.job.counted_fields import FINGERPRINTED, FREE_ENGINE_ARGUMENTS, counted_env
from prefect_raybatch.job.edits import first_of, larger_of, with_answer_schema, with_template_text
from prefect_raybatch.job.escalate import larger_named
from prefect_raybatch.job.functions import source_digest
from prefect_raybatch.job.openai_batch import BATCH_FORMAT, REQUEST_FORM, REQUEST_FUNCTIONS
from prefect_raybatch.job.own_code.loading import shown_name
from prefect_raybatch.job.secrets import (
    catalog_place,
    counted_catalog,
    endpoint_identity,
    hide_argument,
    unsigned,
    url_identity,
)
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger.records import digest, dump
from prefect_raybatch.model import adapters, chat_template
from prefect_raybatch.model import pinned as models
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.run import Identity
from prefect_raybatch.storage import is_remote

KnownModels = Mapping[tuple[str, str | None], models.PinnedModel]
"""Hugging Face models that are pinned already, by name and revision as a job has them."""


@dataclass(frozen=True)
class Resolved:
    """A job with its files read, its model pinned if possible, and its fingerprint (`identity`).

    `job` has the texts of its chat template and answer schema. `pinned_model` is the model as a
    plan records it; None until `pinned` looks up the commit of a Hugging Face model. `checked`:
    `model.check` has checked the model's files. In a cascade, `first` is the job of the first
    model, and `pinned_model` is the larger model.

    `classifier` has the bytes of the job's classifier file. `training` records the fields and the
    embedding model with which the classifier was trained. `of` raises an error if the job does not
    agree with this record. While the model is not pinned, it compares only the model's name.
    """

    job: BatchJob
    pinned_model: Mapping[str, Any] | None
    identity: Identity
    checked: bool = False
    first: Resolved | None = None
    classifier: bytes | None = field(default=None, repr=False)
    training: Training | None = None

    @classmethod
    def of(
        cls,
        job: BatchJob,
        model: Mapping[str, object] | None,
        retry: Mapping[str, object] | None = None,
    ) -> Resolved:
        """Return the job resolved with `model`; `retry` names the failed rows of a retry run.

        `model` is as a plan records it, None if it is not pinned yet. `retry` has the form of
        `Identity.retry`. Reads the files of the chat template and the classifier, but not the
        answer schema, which `resolve` loads. Raises `ConfigError` for a classifier that was trained
        for other fields, other labels or another model.
        """
        if job.prompt.chat_template is not None:
            job = with_template_text(job, chat_template.template_text(job.prompt.chat_template))
        if job.output.escalate.engine is None:
            identity = fingerprint(job, model, retry)
            data, training = _classifier(job, identity)
            found = cls(job, model, identity, classifier=data, training=training)
            found.check_encoder()
            return found
        small = first_of(job)
        first = cls.of(small, _folder_model(model_request(small.engine)), retry)
        if first.training is not None:
            first.training.check_choice(str(job.engine.classifier), job.sampling.choice or ())
        return cls(job, model, fingerprint(job, model, retry), first=first)

    @property
    def request(self) -> ModelRequest:
        return model_request(larger_of(self.job).engine)

    @property
    def model(self) -> dict[str, Any]:
        """Return the model as a plan records it; raise `ConfigError` if it is not pinned yet."""
        if self.pinned_model is None:
            raise ConfigError(
                f"engine.model: {self.job.engine.model} is not pinned to a commit; call `pinned` "
                "first"
            )
        return dict(self.pinned_model)

    def check_encoder(self) -> None:
        """Raise `ConfigError` if the classifier was trained on embeddings of another model.

        Does nothing without a classifier.
        """
        if self.training is not None:
            known = self.pinned_model
            identity = None if known is None else str(known["identity"])
            name, model = str(self.job.engine.classifier), self.job.engine.model
            self.training.check_encoder(name, model, identity)

    def with_adapters(self) -> dict[str, Any]:
        """Return the model as a new plan records it, with the job's adapters pinned as well."""
        found = adapters.pin_adapters(self.request)
        return {**self.model, "adapters": found} if found else self.model

    def pinned(self, known: KnownModels = MappingProxyType({})) -> Resolved:
        """Return the job with each Hugging Face model pinned to the commit that its name means now.

        A model that is in `known` is pinned as it is there. Raises `ConfigError` if the classifier
        was trained on embeddings of another commit.
        """
        both = (self,) if self.first is None else (self, self.first)
        if all(one.pinned_model is not None for one in both):
            return self
        first = None if self.first is None else self.first.pinned(known)
        model, request = self.pinned_model, self.request
        if model is None:
            with larger_named(self.first is not None):
                model = known.get((request.name, request.revision)) or models.pin(request)
        found = replace(self, pinned_model=model, first=first)
        found.check_encoder()
        return found

    def retrying(self, retry: Mapping[str, object] | None) -> Resolved:
        """Return the job with the failed rows in `retry` as its input, in place of the source.

        `retry` has the form of `Identity.retry`. If it is None, the input is the job's source.
        """
        if retry == self.identity.retry:
            return self
        first = None if self.first is None else self.first.retrying(retry)
        return replace(self, identity=fingerprint(self.job, self.pinned_model, retry), first=first)


def resolve(job: BatchJob | Resolved, retry: Mapping[str, object] | None = None) -> Resolved:
    """Return the job resolved; `retry` names the failed rows of a retry run (see `Identity.retry`).

    A job that is resolved already is not resolved again; only a `retry` replaces its input. Uses
    the network only for files in remote folders. Raises `ConfigError` for anything that the policy
    forbids, for a missing model, and for functions that cannot be imported.
    """
    if isinstance(job, Resolved):
        return job.retrying(retry) if retry is not None else job
    check_trust(job)
    job = with_answer_schema(job)
    with larger_named(job.output.escalate.engine is not None):
        model = _folder_model(model_request(larger_of(job).engine))
    return Resolved.of(job, model, retry)


def _folder_model(request: ModelRequest) -> dict[str, Any] | None:
    """Return the model as a plan records it; None for a Hugging Face name.

    A Hugging Face name is not looked up here. Other models are bundled, hosted or in a folder.
    """
    name = request.name
    is_here = name == models.DEMO or is_remote(name) or os.path.exists(name)
    return models.pin(request) if is_here else None


def _classifier(job: BatchJob, identity: Identity) -> tuple[bytes | None, Training | None]:
    """Return (bytes of the job's classifier file, its `Training`); (None, None) without one.

    Raises `ConfigError` if the file is not a classifier, if it was replaced after `identity` was
    computed, or if the job's embeddings differ from those that it was trained on.
    """
    name = job.engine.classifier
    if name is None:
        return None, None
    data = read_file(name, job.output.options)
    if classifier_identity(data) != identity.parts["engine.classifier"]:
        raise ConfigError(f"engine.classifier: {name} was replaced meanwhile. Run this again")
    training = Classifier.from_bytes(data, f"engine.classifier: {name}").training
    training.check_fields(name, identity.parts)
    return data, training


def _uris(job: BatchJob) -> list[str]:
    return [unsigned(uri) if is_web(uri) else uri for uri in job.source.uris]


def _shown(name: str | None) -> str | None:
    return None if name is None else shown_name(name)


def _catalog(job: BatchJob) -> dict[str, Any]:
    return counted_catalog(job.source.catalog) if job.source.catalog else {}


def _engine_arguments(job: BatchJob) -> dict[str, Any]:
    arguments = job.engine.vllm_arguments
    return {k: v for k, v in sorted(arguments.items()) if k not in FREE_ENGINE_ARGUMENTS}


def _engine_parts(job: BatchJob) -> dict[str, Any]:
    """Return the parts of the fingerprint that come from fields of the job's `engine`."""
    found = answer_fields(job)
    return {name: value for name, value in found.items() if name.split(".")[0] == "engine"}


# Fields of FINGERPRINTED that count with another value than their own: functions that return it.
FIELD_READERS: dict[str, Callable[[BatchJob], Any]] = {
    "source.uri": _uris,
    "source.catalog": _catalog,
    "prompt.function": lambda job: _shown(job.prompt.function),
    "output.postprocess": lambda job: _shown(job.output.postprocess),
    "engine.(extra)": _engine_arguments,
    "engine.endpoint.url": lambda job: (
        job.engine.endpoint.url and unsigned(job.engine.endpoint.url)
    ),
    "engine.endpoint.model": lambda job: job.engine.endpoint.model,
    "output.schema_model": lambda job: job.output.answer_form,
    "output.escalate.to": lambda job: _engine_parts(larger_of(job)),
    "output.on_cut_off": lambda job: "fail" if job.output.on_cut_off == "fail" else None,
}
CASCADE = "output.escalate."
COUNTED_WHEN: dict[str, Callable[[BatchJob], bool]] = {  # the other fields always count
    **{
        name: lambda job: job.output.escalate.engine is not None
        for name in FINGERPRINTED
        if name.startswith(CASCADE)
    },
    "source.served_as": lambda job: job.source.format == BATCH_FORMAT,
    "source.sample": lambda job: job.source.sample is not None,
    "source.sample_seed": lambda job: job.source.sample is not None,
    "engine.max_model_len_percentile": lambda job: job.engine.max_model_len == "auto",
    "engine.endpoint.url": lambda job: job.engine.endpoint.asked is not None,
    "engine.endpoint.model": lambda job: job.engine.endpoint.asked is not None,
    "engine.endpoint.api": lambda job: job.engine.endpoint.api != "chat",
    "output.reasoning_column": lambda job: job.output.reasoning_parser is not None,
    "output.tool_calls_column": lambda job: job.output.tool_parser is not None,
}
# Fields that `fingerprint` itself looks up.
BY_CONTENT = ("engine.adapter", "engine.adapters", "engine.classifier")
PART_NAMES = {"engine.(extra)": "engine", "output.output_schema": "output.schema"}


def fingerprint(
    job: BatchJob,
    model: Mapping[str, Any] | None = None,
    retry: Mapping[str, Any] | None = None,
) -> Identity:
    """Return the job's fingerprint and the parts from which it is computed, by name.

    The fingerprint is a SHA-256 of everything in the job that can change an answer. For a
    classifier, and for a model in a local or s3:// folder, the content of the files is hashed. A
    Hugging Face name is hashed as written, because the plan pins its commit when the run begins.

    `model` is the model as a plan records it, None if it is not pinned yet. `retry` names failed
    rows that are the input, in place of the source (see `Identity.retry`).
    """
    parts = answer_fields(job)
    if found := adapters.identities(model_request(job.engine)):
        parts["engine.adapters"] = found
    if job.engine.classifier is not None:
        parts["engine.classifier"] = classifier_identity(
            read_file(job.engine.classifier, job.output.options)
        )
    if job.prompt.function:
        parts["prompt.function.source"] = (
            REQUEST_FORM
            if job.prompt.function in REQUEST_FUNCTIONS
            else source_digest(job.prompt.function, "prompt.function")
        )
    if job.output.postprocess:
        parts["output.postprocess.source"] = source_digest(
            job.output.postprocess, "output.postprocess"
        )
    if job.output.escalate.engine is not None:
        first = _folder_model(model_request(job.engine))
        if first is not None:
            parts["first.model.identity"] = first["identity"]
    if model is not None and "@" not in str(model["identity"]):
        parts["model.identity"] = model["identity"]
    if retry is not None:
        parts = {k: v for k, v in parts.items() if not k.startswith("source.")}
        parts["retry"] = dict(retry)
    return Identity(digest(dump(parts)), shown_parts(parts))


def shown_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a fingerprint for records and messages, without credentials.

    The fingerprint itself is computed from the parts with their credentials.
    """
    shown = {**parts, "engine": hide_argument(parts["engine"], "engine")}
    if (larger := parts.get(f"{CASCADE}to")) is not None:
        shown[f"{CASCADE}to"] = shown_parts(larger)
    if "source.uri" in parts:
        uris = parts["source.uri"]
        shown["source.uri"] = [url_identity(uri) if is_web(uri) else uri for uri in uris]
    if url := parts.get("engine.endpoint.url"):
        shown["engine.endpoint.url"] = endpoint_identity(url)
    if parts.get("source.catalog"):
        shown["source.catalog"] = catalog_place(parts["source.catalog"])
    return shown


# Parts of a fingerprint that are looked up: in the functions' modules, adapters and model.
LOOKED_UP = (
    *("engine.adapters", "engine.classifier"),
    *("prompt.function.source", "output.postprocess.source"),
    *("model.identity", "first.model.identity", "retry"),
)


def answer_fields(job: BatchJob) -> dict[str, Any]:
    """Return the parts of the fingerprint that come from the job's own fields, by field name.

    Unlike `shown_parts`, they may contain secrets.
    """
    values = job.model_dump(mode="json", exclude={"output": {"schema_model"}})
    parts = {
        PART_NAMES.get(name, name): FIELD_READERS[name](job)
        if name in FIELD_READERS
        else reduce(getitem, name.split("."), values)
        for name in FINGERPRINTED
        if name not in BY_CONTENT and (name not in COUNTED_WHEN or COUNTED_WHEN[name](job))
    }
    return parts | counted_env(job.engine.env)

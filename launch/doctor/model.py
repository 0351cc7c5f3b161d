"""Checks that need the model and torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from launch.doctor.check import CheckResult, Outcome, attempt
from launch.doctor.fit import device_type, plan_memory, stage_weights
from launch.doctor.gpu import examine_attention, examine_gpus
from launch.doctor.held_weights import describe_quantisation, held_weights
from launch.doctor.tiers import examine_tiers
from launch.table import human_bytes
from raycache.api.chat import ChatTemplate
from raycache.api.defaults import Defaults
from raycache.api.formats.find import find_format, ignores_tools
from raycache.api.formats.history import find_history
from raycache.api.repairs import Repairs
from raycache.api.tokenizer import Tokenizer
from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.config import Config
from raycache.deployment.deployment import Deployment, served_model
from raycache.deployment.stages import with_stages
from raycache.deployment.weights import why_no_kernels, with_weights_form
from raycache.errors import ConfigError
from raycache.models.base import ModelConfig, check_split, check_weights, read_config
from raycache.models.drafts.loading import check_draft
from raycache.parallel.devices import GpuModel
from raycache.parallel.sharding import Split
from raycache.rank.backend import device_obstacle


def examine_model(config: Config) -> Iterator[CheckResult]:
    """Check the device, the model directory, the split and the memory."""
    devices = list(_devices(config))
    yield from devices
    try:
        model = served_model(config)
    except ConfigError as error:
        model = None
        yield CheckResult("model", Outcome.FAILED, str(error))
    if not Path(config.model).is_dir():
        return
    has_devices = all(one.outcome is not Outcome.FAILED for one in devices)
    found = [*_files(config, model), *(_splits(config, model, has_devices=has_devices) if model else [])]
    yield from found
    if model and has_devices and all(one.outcome is not Outcome.FAILED for one in found):
        yield from _memory(Deployment(with_stages(config, model), model, device_type(config)))


def _devices(config: Config) -> Iterator[CheckResult]:
    if device_type(config) == "cuda":
        yield from examine_gpus(config)
    else:
        yield CheckResult("device", Outcome.OK, "cpu")


def _files(config: Config, model: ModelConfig | None) -> Iterator[CheckResult]:
    folder = Path(config.model)
    if config.dummy_weights:
        yield CheckResult("weights", Outcome.OK, "random, with the shapes in config.json")
    else:
        yield attempt("weights", lambda: _weights(folder))
    if model is not None and model.draft is not None and not config.dummy_weights:
        yield attempt("draft", lambda: _draft(model, folder))
    try:
        tokenizer = Tokenizer(folder, is_optional=config.dummy_weights)
        if model is not None and not config.dummy_weights:
            tokenizer.check_fits(model.vocab_size)
        template = ChatTemplate.load(tokenizer, path=config.chat_template)
    except ConfigError as error:
        yield CheckResult("tokenizer", Outcome.FAILED, str(error))
        return
    yield CheckResult("tokenizer", Outcome.OK, f"{tokenizer.vocab_size} tokens, {tokenizer.description}")
    if template.origin:
        yield CheckResult("chat template", Outcome.OK, template.origin)
        yield from _chat_format(template, tokenizer)
    else:
        yield CheckResult("chat template", Outcome.WARNING, "none; chat completions need --chat-template FILE")
    yield attempt("repairs of chats", lambda: Repairs.of(config).description)
    yield attempt("sampling defaults", lambda: Defaults.of(config).description)


def _chat_format(template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[CheckResult]:
    found = find_format(template, tokenizer=tokenizer)
    notes = find_history(template, ids=found.ids).notes()
    if ignores_tools(template):
        yield CheckResult("chat format", Outcome.OK, f"{found}; the template ignores tools, so tools are refused")
    elif found.calls is None and not found.has_channels:
        text = f"{found}; the template shows tools, but the format of calls is unknown, so they stay text"
        yield CheckResult("chat format", Outcome.WARNING, text)
    else:
        yield CheckResult("chat format", Outcome.OK, "; ".join([str(found), *notes]))


def _draft(model: ModelConfig, folder: Path) -> str:
    assert model.draft is not None, "there is one"
    check_draft(model, folder)
    return f"{model.draft.model.name}: {model.draft.model.num_layers} layers of {model.draft.model.model_type}"


def _weights(folder: Path) -> str:
    checkpoint = Checkpoint(folder)
    check_weights(read_config(folder), checkpoint)
    return f"{human_bytes(checkpoint.num_bytes)} in safetensors files"


def _splits(config: Config, model: ModelConfig, *, has_devices: bool) -> Iterator[CheckResult]:
    deployment = Deployment(config, model, device_type(config))

    def tensor() -> str:
        check_split(model, Split(tp=config.tp, cp=config.cp))
        counts = ", ".join(f"{count.name} {count.count}" for count in model.head_counts)
        return f"tp={config.tp} and cp={config.cp} divide {counts}"

    def pipeline() -> str:
        check_split(model, Split(pp=config.pp, stages=config.stages))
        staged = with_stages(config, model)
        if config.pp == 1:
            return f"pp=1: all {model.num_layers} layers on every rank"
        dtype = deployment.dtype
        sizes = ", ".join(human_bytes(size * dtype.itemsize) for size in stage_weights(staged, model))
        in_type = str(dtype).removeprefix("torch.")
        return f"pp={config.pp}: stages of {staged.pp_layers} layers, {sizes} of weights in {in_type}"

    share = config.page_size // config.cp
    part = f"; the text part of a {model.part_of}, whose vision part is not loaded" if model.part_of else ""
    told = f"{model.name}: {model.model_type}, {model.num_layers} layers, {model.dtype}{part}"
    yield CheckResult("model", Outcome.OK, told)
    if model.doubt:
        yield CheckResult("config", Outcome.WARNING, model.doubt)
    yield attempt("tensor split", tensor)
    yield attempt("pipeline split", pipeline)
    yield CheckResult(
        "context split", Outcome.OK, f"cp={config.cp}: {share} of {config.page_size} tokens of each page per rank"
    )
    yield attempt("context", lambda: f"{deployment.max_model_len} tokens for prompt and output together")
    yield from _attention(deployment, has_devices=has_devices)


def _attention(deployment: Deployment, *, has_devices: bool) -> Iterator[CheckResult]:
    config = deployment.config
    try:
        dtype = deployment.dtype
    except ConfigError as error:
        yield CheckResult("attention", Outcome.FAILED, str(error))
        return
    if deployment.device_type == "cpu":
        yield attempt("attention", lambda: _attention_on_cpu(config, dtype))
    elif has_devices:
        yield from examine_attention(config, deployment.components, dtype=dtype)


def _attention_on_cpu(config: Config, dtype: torch.dtype) -> str:
    if config.attention == "flashinfer":
        raise ConfigError(f"attention=flashinfer cannot be used: {device_obstacle(torch.device('cpu'), dtype)}")
    return f"torch: {str(dtype).removeprefix('torch.')} on cpu"


def _gpus(deployment: Deployment) -> list[GpuModel]:
    if deployment.device_type != "cuda":
        return []
    return [GpuModel.of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _memory(deployment: Deployment) -> Iterator[CheckResult]:
    quantisation = read_quantisation(Path(deployment.config.model))
    reason = why_no_kernels(deployment, _gpus(deployment))
    try:
        deployment = with_weights_form(deployment, _gpus(deployment))
    except ConfigError as error:
        yield CheckResult("quantisation", Outcome.FAILED, str(error))
        quantisation = None
    config, held = deployment.config, held_weights(deployment)
    if quantisation is not None:
        told = describe_quantisation(quantisation, held, deployment)
        yield CheckResult("quantisation", Outcome.OK, f"{told}: {reason}" if reason else told)
    yield CheckResult("weights per rank", Outcome.OK, str(held))
    try:
        plan = plan_memory(deployment, weight_bytes=held.total)
    except ConfigError as error:
        yield CheckResult("cache", Outcome.FAILED, str(error))
        return
    used = plan.weight_bytes + plan.cache_bytes
    need = f"about {human_bytes(used)} per rank for weights and cache, {human_bytes(plan.free_bytes)} free"
    if deployment.device_type == "cuda":
        need += "; the memory of a step is measured at startup"
    per_token = human_bytes(plan.page_bytes / plan.page_size)
    yield CheckResult("cache per rank", Outcome.OK, f"{per_token} per token, {human_bytes(plan.page_bytes)} per page")
    for space, (count, size) in plan.slots.items():
        text = f"{count} of {human_bytes(size)}, for {config.max_running} running requests and for restore points"
        yield CheckResult(f"{space} cache", Outcome.OK, text)
    if plan.num_pages == 0:
        yield CheckResult("cache", Outcome.FAILED, f"no page fits beside the weights: {need}; use more ranks")
        return
    if plan.weight_bytes > plan.free_bytes:
        yield CheckResult("memory", Outcome.FAILED, f"{need}; use more ranks")
    else:
        yield CheckResult("memory", Outcome.WARNING if plan.is_too_large else Outcome.OK, need)
    holds = f"{plan.num_pages} pages, {plan.num_tokens} tokens in total"
    if plan.num_tokens < deployment.max_model_len:
        text = f"{holds}, less than the context length: longer requests are rejected; raise kv_memory or cp"
        yield CheckResult("cache", Outcome.WARNING, text)
    else:
        yield CheckResult("cache", Outcome.OK, holds)
    is_shared = deployment.device_type == "cpu"
    yield from examine_tiers(deployment, taken=used * config.world_size if is_shared else 0)

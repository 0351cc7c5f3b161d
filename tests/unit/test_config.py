"""Settings: sizes, types, and what is said about wrong ones."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raycache.config import Config, divisors, parse_bytes
from raycache.errors import ConfigError, RayCacheError


def test_defaults_are_a_gang_of_one_on_loopback_without_a_key() -> None:
    config = Config()
    assert (config.world_size, config.host, config.api_key) == (1, "127.0.0.1", "")


def test_world_size_is_the_product_of_all_axes() -> None:
    assert Config(tp=3, pp=2, cp=4).world_size == 24


def test_every_setting_has_a_help_text_and_a_group() -> None:
    for field in dataclasses.fields(Config):
        assert field.metadata["help"] and field.metadata["group"], field.name


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", 1), ("512B", 512), ("4GiB", 4 * 1024**3), ("1.5 gb", 1_500_000_000), (" 2 kib ", 2048), ("1TB", 10**12)],
)
def test_sizes_are_read_with_their_unit(text: str, wanted: int) -> None:
    assert parse_bytes("kv_memory", text) == wanted


@pytest.mark.parametrize("text", ["", "0", "0.5B", "-1GiB", "4 G", "1e9", "nan", "GiB", "4GiBs", "9" * 400 + "GiB"])
def test_what_is_no_size_is_refused_with_the_settings_name(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        Config(kv_memory=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp", 0),
        ("pp", -1),
        ("page_size", 0),
        ("num_pages", -1),
        ("num_pages", "none"),
        ("draft_tokens", 0),
        ("max_running", 0),
        ("max_model_len", -5),
        ("port", 65536),
        ("port", -1),
        ("request_timeout_s", math.nan),
        ("rank_timeout_s", 0.0),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("attention", "flash"),
        ("max_body", "big"),
        ("host_memory", "much"),
        ("host_memory", "-1GiB"),
        ("eviction", "random"),
        ("write_policy", "write_around"),
        ("prefetch", "never"),
        ("prefetch_timeout_s", 0.0),
        ("prefetch_timeout_s", math.nan),
        ("prefetch_share", 0.0),
        ("prefetch_share", 1.1),
        ("prompt_share", 0.0),
        ("prompt_share", 1.1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}"):
        Config.from_mapping({name: value})


@pytest.mark.parametrize(("text", "has_tier"), [("none", False), ("auto", True), ("1", True), ("64GiB", True)])
def test_a_host_tier_is_there_unless_it_is_none(text: str, has_tier: bool) -> None:
    assert Config(host_memory=text).has_host_tier is has_tier


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_model_len", "auto"),
        ("num_pages", "auto"),
        ("restore_points", "auto"),
        ("max_step_tokens", "auto"),
        ("port", "auto"),
        ("restore_interval", "none"),
        ("request_timeout_s", "none"),
        ("kv_memory", "auto"),
        ("host_memory", "auto or none"),
    ],
)
def test_a_zero_is_refused_with_the_word_for_it_and_the_word_works(name: str, words: str) -> None:
    for zero in (0, "0"):
        with pytest.raises(ConfigError, match=f"^{name} must be .* or {words}, got '?0"):
            Config.from_mapping({name: zero})
    for word in words.split(" or "):
        assert Config.from_mapping({name: word})


@pytest.mark.parametrize(
    "wrong", [{"storage": "file:///d?size=1GiB"}, {"write_policy": "write_back"}, {"prefetch": "timeout"}]
)
def test_what_needs_a_host_tier_is_refused_without_one(wrong: dict[str, str]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{name}=.* needs a host tier.*host_memory=auto"):
        Config(**wrong)
    assert Config(**wrong, host_memory="auto").has_host_tier


def test_a_password_in_a_storage_url_is_not_in_its_refusal() -> None:
    with pytest.raises(ConfigError) as refused:
        Config(storage="redis://user:hidden@127.0.0.1/0")
    assert "hidden" not in str(refused.value)


def test_a_host_tier_without_cached_prefixes_is_refused_and_both_ways_out_work() -> None:
    with pytest.raises(ConfigError, match="prefix_cache=False.*host_memory=none"):
        Config(host_memory="1GiB", prefix_cache=False)
    assert Config(host_memory="1GiB") and Config(prefix_cache=False)


def test_a_path_as_storage_is_refused_with_its_url() -> None:
    for wrong in ("/var/cache/x", ""):
        with pytest.raises(ConfigError, match=f"is not a URL or none.*file://{wrong or os.getcwd()}"):
            Config(storage=wrong, host_memory="auto")


@pytest.mark.parametrize("host_memory", ["none", "auto"])
def test_no_storage_has_a_word_and_is_the_default(host_memory: str) -> None:
    config = Config.from_mapping(yaml.safe_load(f"{{storage: none, host_memory: {host_memory}}}"))
    assert config == Config(host_memory=host_memory) and not config.has_storage


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("num_ingress: 2\ningress: serve", "num_ingress", "2"),
        ("num_ingress: 1-4\ningress: serve", "num_ingress", "1-4"),
        ("pp_layers: 24", "pp_layers", "24"),
    ],
)
def test_a_number_in_yaml_needs_no_quotes(text: str, name: str, wanted: str) -> None:
    assert getattr(Config.from_mapping(yaml.safe_load(text)), name) == wanted


@given(cp=st.integers(1, 200), page_size=st.integers(1, 512))
def test_a_page_that_cp_cannot_share_is_refused_and_both_ways_out_work(cp: int, page_size: int) -> None:
    if page_size % cp == 0:
        assert Config(cp=cp, page_size=page_size).page_size == page_size
        return
    with pytest.raises(ConfigError) as refused:
        Config(cp=cp, page_size=page_size)
    assert all(Config(cp=other, page_size=page_size) for other in divisors(page_size))
    offered = int(str(refused.value).rsplit("page_size=", 1)[1])
    assert Config(cp=cp, page_size=offered).page_size == offered


@given(st.integers(1, 2000))
def test_divisors_are_all_and_only_those_that_divide(number: int) -> None:
    assert divisors(number) == sorted(divisors(number))
    assert set(divisors(number)) == {d for d in range(1, number + 1) if number % d == 0}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("page_szie", "page_size"),
        ("kv-memory", "kv_memory"),
        ("maxModelLen", "max_model_len"),
        ("prot", "port"),
        ("replica", "replicas"),
        ("api_kyes", "api_keys"),
        ("cq", ""),
        ("min_running", ""),
        ("tensor_parallel_size", ""),
        ("max_seq_len", ""),
        ("", ""),
        ("--", ""),
    ],
)
def test_a_mistyped_setting_gets_the_one_that_was_meant_or_none(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.from_mapping({name: 32})
    assert str(refused.value) == f"unknown setting {name!r}; " + (
        f"did you mean {meant!r}?" if meant else "`raycache launch --help-all` lists all"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", "2"), ("tp", 2.0), ("tp", True), ("prefix_cache", 1), ("host", None), ("model", 7), ("host_memory", 7)],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a|{name} must be true or false"):
        Config.from_mapping({name: value})


def test_a_whole_number_is_a_number_of_seconds() -> None:
    assert Config.from_mapping({"request_timeout_s": 30}).request_timeout_s == 30


def test_a_refused_setting_is_also_a_value_error_and_one_of_ours() -> None:
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, RayCacheError)

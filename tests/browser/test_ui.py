"""The page at /ui in a real browser: what it shows, by mouse and keyboard, narrow and dark, and under attack."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from raycache.api.tokenizer import Tokenizer
from raycache.types import Miss, StreamPhase, StreamState
from tests.browser.cached import PAGE, CachedEngine, served
from tests.browser.driver import Browser, browser, needs_browser
from tests.oracle import tiny_tokenizers

pytestmark = [needs_browser, pytest.mark.long]

_HOSTILE = (
    "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>",
    "</pre></button><svg onload=window.hacked=1><iframe srcdoc='<script>parent.hacked=1</script>'>",
    "javascript:window.hacked=1 \" onfocus=window.hacked=1 autofocus x='\u202egnp.exe",
)
_FILLER = " and then a long text that fills a page of the cache or two." * 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def engine(tokenizer: Tokenizer) -> CachedEngine:
    """Three conversations after one system message, and one of its own; a prompt with another salt."""
    engine = CachedEngine(tokenizer)
    for number in range(3):
        engine.put("You are an agent." + _FILLER, f"{number} Question {number}" + _FILLER * (1 + number))
    engine.put("Another system message" + _FILLER)
    engine.put("Of somebody else" + _FILLER, salt="theirs")
    return engine


def show(window: Browser, endpoint: str, *, width: int = 1280, is_dark: bool = False) -> None:
    window.open(f"{endpoint}/ui", width=width, is_dark=is_dark)
    window.until("document.querySelector('#map button') !== null")


def complaints(window: Browser, endpoint: str) -> list[str]:
    """What the page of this server wrote to the console; an earlier one may have asked a server that was gone."""
    return [line for line in window.log() if line.startswith(endpoint)]


def labels(window: Browser) -> list[str]:
    found: list[str] = window.run(
        "[...document.querySelectorAll('#map button')].map(b => b.getAttribute('aria-label'))"
    )
    return found


def test_it_opens_prefixes_with_the_keyboard(window: Browser, engine: CachedEngine, tokenizer: Tokenizer) -> None:
    with served(engine, tokenizer) as endpoint:
        show(window, endpoint)
        tenants = labels(window)
        assert [label.partition(",")[0] for label in tenants] == ["without a cache_salt", "with a cache_salt"]
        window.run("document.querySelector('#map button').focus()")
        window.press("Enter")
        window.until("document.querySelectorAll('#crumbs button').length === 2")
        first, second = labels(window)
        assert first.startswith("You are an agent.") and second.startswith("Another system")
        assert window.run("document.activeElement.getAttribute('aria-label')") == first
        assert "You are an agent." in window.run("document.querySelector('#detail pre').textContent")
        window.press("ArrowDown", "ArrowRight")  # one of them leads to the other, wherever it lies
        assert window.run("document.activeElement.getAttribute('aria-label')") == second
        window.run("document.querySelector('#map button').focus()")
        window.press("Enter")
        below = window.until("document.querySelectorAll('#crumbs button').length === 3") and labels(window)
        assert len(below) == 4 and any("the part that these share" in label for label in below)
        pages = engine.trees["device"].num_cached
        assert pages * PAGE > 100
        window.press("Escape")
        window.until("document.querySelectorAll('#crumbs button').length === 2")
        assert labels(window) == [first, second]
        window.run("[...document.querySelectorAll('#tiers button')].find(b => b.textContent === 'host').click()")
        window.until("document.querySelector('#tiers [aria-pressed=true]').textContent === 'host'")
        assert complaints(window, endpoint) == []


@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_and_follows_the_colour_scheme(
    window: Browser, engine: CachedEngine, tokenizer: Tokenizer, width: int
) -> None:
    with served(engine, tokenizer) as endpoint:
        grounds = []
        for is_dark in (False, True):
            show(window, endpoint, width=width, is_dark=is_dark)
            window.until("document.querySelectorAll('#ranks tbody tr').length === 4")
            assert window.run("document.documentElement.scrollWidth <= window.innerWidth")
            grounds.append(window.run("getComputedStyle(document.body).backgroundColor"))
            outside = window.run(
                "[...document.querySelectorAll('#map .cell')].filter(c => c.offsetLeft + c.offsetWidth > "
                "document.querySelector('#map').clientWidth + 1).length"
            )
            assert outside == 0
        assert len(set(grounds)) == 2
        asked = window.run("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert asked and all(name.startswith(f"{endpoint}/") for name in asked)


def test_it_shows_what_could_have_been_reused(window: Browser, engine: CachedEngine, tokenizer: Tokenizer) -> None:
    engine.reuse = {"cached_tokens": 0, "miss": Miss.EVICTED_HOST}
    with served(engine, tokenizer) as endpoint:
        for number in (1, 2, 3, 1, 2, 3):
            body = {"model": "tiny", "max_tokens": 1, "prompt": f"{number}{_FILLER * number}"}
            assert httpx.post(f"{endpoint}/v1/completions", json=body).status_code == 200
        answer = httpx.get(f"{endpoint}/cache/achievable").json()
        assert answer["total"]["achievable"] > 0.4
        show(window, endpoint)
        window.until("document.querySelector('#gap polyline') !== null")
        tiles = window.run("[...document.querySelectorAll('.tile')].map(tile => tile.textContent)")
        assert any(tile.startswith(f"{100 * answer['total']['achievable']:.0f} %achievable") for tile in tiles)
        points = window.run("document.querySelector('#gap polyline').points.length")
        assert points == len(answer["curve"]) + 1  # to the edge
        assert window.run("document.querySelector('#lost tbody td').textContent") == answer["total"]["lost"][0]["cause"]
        window.until("document.querySelector('#moves th:last-child').textContent === 'twice as large'")


def test_what_was_reused_never_exceeds_what_could_have_been(
    window: Browser, engine: CachedEngine, tokenizer: Tokenizer
) -> None:
    """The engine counts a request before it has ended, and each choice of a prompt."""
    engine.reuse = {"cached_tokens": PAGE, "miss": Miss.EVICTED_HOST}
    engine.figures = {"prompt_tokens": 1000, "cached_tokens": 990}
    with served(engine, tokenizer) as endpoint:
        for _ in range(2):
            body = {"model": "tiny", "max_tokens": 1, "prompt": _FILLER}
            assert httpx.post(f"{endpoint}/v1/completions", json=body).status_code == 200
        reuse = httpx.get(f"{endpoint}/status").json()["reuse"]
        assert 0 < reuse["achieved"] < reuse["achievable"]
        show(window, endpoint)
        window.until("document.querySelectorAll('.tile').length > 2")
        tiles = window.run("[...document.querySelectorAll('.tile b')].map(value => value.textContent)")
        assert tiles[:2] == [f"{100 * reuse[name]:.0f} %" for name in ("achieved", "achievable")]


@contextmanager
def streaming(endpoint: str, engine: CachedEngine, *, count: int, key: str = "") -> Iterator[list[str]]:
    """Requests that run in the block; their ids, the oldest first."""
    body = {"model": "tiny", "prompt": "A prompt that the list must not show", "stream": True, "ignore_eos": True}
    headers, before = {"Authorization": f"Bearer {key}"} if key else {}, len(engine.requests)
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=count)) as client, ExitStack() as stack:
        for number in range(count):
            body |= {"max_tokens": 5000, "prompt": f"{number} {_FILLER * (1 + number)}"}
            answer = stack.enter_context(
                client.stream("POST", f"{endpoint}/v1/completions", json=body, headers=headers)
            )
            assert answer.status_code == 200
        yield [request.request_id for request in engine.requests[before:]]


_ROWS = "[...document.querySelectorAll('#live tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("is_dark", [False, True])
def test_live_streams_are_listed_and_scrolled_with_the_keyboard(
    window: Browser, tokenizer: Tokenizer, width: int, is_dark: bool
) -> None:
    engine = CachedEngine(tokenizer, delay_s=0.05)
    engine.put("Something" + _FILLER)
    with served(engine, tokenizer) as endpoint, streaming(endpoint, engine, count=24) as ids:
        phases = list(StreamPhase)
        for number, name in enumerate(ids[:4]):
            engine.states[name] = StreamState(phases[number], 9, 0, {"device": 512, "host": 128} if number else {})
        show(window, endpoint, width=width, is_dark=is_dark)
        window.until("document.querySelectorAll('#live tbody tr').length === 20")
        rows = window.run(_ROWS)
        assert [row[0] for row in rows] == ids[:20]
        heads = window.run("[...document.querySelectorAll('#live th')].map(head => head.textContent)")
        assert heads == ["request", "state", "age", "prompt", "cached", "output", "tokens/s"]
        assert [row[1] for row in rows[:4]] == phases
        assert [row[3] for row in rows[:3]] == [str(len(request.prompt)) for request in engine.requests[:3]]
        assert rows[1][4] == "512 device + 128 host" and rows[0][4] == "\u2013"
        window.until("Number(document.querySelector('#live tbody tr').cells[5].textContent) > 1")
        assert "4 more are not listed" in window.run("document.querySelector('#live caption').textContent")
        assert "long text" not in window.run("document.querySelector('#live-card').textContent")
        # It fits, whole words and all, and the keyboard gets to its end.
        assert window.run("document.documentElement.scrollWidth <= window.innerWidth")
        list_ = "document.querySelector('#live-list')"
        assert window.run(f"{list_}.scrollWidth <= {list_}.clientWidth + 1")
        assert window.run(
            "[...document.querySelectorAll('#live td')].every(cell => cell.getClientRects().length === 1)"
        )
        window.run("document.querySelector('#pause').click()")
        window.run(f"{list_}.focus()")
        assert window.run(f"document.activeElement === {list_}")
        window.press("End")
        window.until(f"{list_}.scrollTop + {list_}.clientHeight >= {list_}.scrollHeight - 2")
        tree = window.devtools("Accessibility.getFullAXTree")["nodes"]
        roles = [node["role"]["value"] for node in tree if not node["ignored"]]
        names = [node.get("name", {}).get("value") for node in tree if node["role"]["value"] == "table"]
        assert "Live streams" in names and roles.count("columnheader") >= len(heads)
        colours = window.run(
            "(cell => [getComputedStyle(cell).color, getComputedStyle(document.querySelector('#live-card'))"
            ".backgroundColor])(document.querySelector('#live td'))"
        )
        assert contrast(*colours) >= 4.5  # WCAG 2.2, 1.4.3
        assert complaints(window, endpoint) == []
    window.run("document.querySelector('#pause').click()")


def contrast(*colours: str) -> float:
    """Contrast ratio of two CSS colours (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


def test_streams_that_end_leave_the_list(window: Browser, tokenizer: Tokenizer) -> None:
    engine = CachedEngine(tokenizer, delay_s=0.05)
    engine.put("Something" + _FILLER)
    with served(engine, tokenizer) as endpoint:
        with streaming(endpoint, engine, count=2):
            show(window, endpoint)
            window.until("document.querySelectorAll('#live tbody tr').length === 2")
            assert window.run("document.querySelector('#live-none').hidden")
        window.until("!document.querySelector('#live-none').hidden")
        assert window.run("document.querySelector('#live').hidden")


def test_a_page_opened_late_plots_what_was_before(
    window: Browser, engine: CachedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.http.history.INTERVAL_S", 0.2)
    engine.reuse = {"cached_tokens": 0, "miss": Miss.EVICTED_DEVICE}
    with served(engine, tokenizer) as endpoint:
        shares = (0.25, 0.5, 1.0)
        engine.figures = {"prompt_tokens": 0, "cached_tokens": 0}
        ask = {"model": "tiny", "max_tokens": 1, "prompt": _FILLER}
        for number, share in enumerate(shares):
            before = engine.figures
            assert httpx.post(f"{endpoint}/v1/completions", json=ask).status_code == 200
            engine.figures = {
                "running": number,
                "prompt_tokens": before["prompt_tokens"] + 1000,
                "cached_tokens": before["cached_tokens"] + int(1000 * share),
            }
            wanted = engine.figures["prompt_tokens"]

            def kept(wanted: int = wanted) -> bool:
                samples = httpx.get(f"{endpoint}/history").json()["samples"]
                return any(sample["prompt_tokens"] == wanted and sample["age_s"] > 0 for sample in samples)

            wait_until(kept)
        show(window, endpoint)
        window.until("document.querySelector('#hits polyline.line') !== null")
        points = window.run("document.querySelector('#hits polyline.line').getAttribute('points')").split()
        assert len(points) >= len(shares)
        heights = [float(point.split(",")[1]) for point in points]
        assert heights[-3:] == sorted(heights[-3:], reverse=True) and len(set(heights[-3:])) == 3
        window.until("document.querySelector('#causes rect') !== null")
        assert "capacity" in window.run("document.querySelector('#causes .legend').textContent")
        peaks = window.run("document.querySelector('#streams polyline').getAttribute('points')").split()
        assert len({point.split(",")[1] for point in peaks}) == 3  # running 0, 1 and 2
        assert complaints(window, endpoint) == []


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_prompts_full_of_markup_are_text(window: Browser, tokenizer: Tokenizer) -> None:
    engine = CachedEngine(tokenizer)
    engine.reuse = {"cached_tokens": 0, "miss": Miss.NEVER_SEEN}
    engine.figures = {"warnings": _HOSTILE, "misses": {_HOSTILE[0]: 3}}
    for text in _HOSTILE:
        engine.put(text + _FILLER)
    with served(engine, tokenizer) as endpoint:
        for clock in ("10:15:02", "11:48:59"):  # lines and tools whose names are markup, in /cache/why
            system = f"<img/src=x/onerror=window.hacked=1>: {clock}\n{_FILLER}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
            body = {"model": "tiny", "max_tokens": 1, "messages": messages}
            assert httpx.post(f"{endpoint}/v1/chat/completions", json=body).status_code == 200
        show(window, endpoint)
        window.until("document.querySelectorAll('#largest tbody tr').length === 3")
        window.until("document.querySelectorAll('#why tbody tr').length > 0")
        shown = []
        for number in range(len(_HOSTILE)):
            window.run("document.querySelectorAll('#map button')[arguments[0]].focus()", number)
            shown.append(window.run("document.querySelector('#detail pre').textContent"))
        heads = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:PAGE]) for text in _HOSTILE]
        assert sorted(shown) == sorted(head.replace("\u202e", "·") for head in heads)
        assert window.run("[...document.querySelectorAll('#warnings li')].map(li => li.textContent)") == list(_HOSTILE)
        assert window.run("document.querySelectorAll('img, iframe, svg[onload], [onfocus], [onerror]').length") == 0
        assert window.run("document.scripts.length") == 1
        assert window.run("typeof window.hacked") == "undefined"
        assert complaints(window, endpoint) == []  # the policy had nothing to stop


def test_the_policy_stops_what_escaping_might_miss(window: Browser, engine: CachedEngine, tokenizer: Tokenizer) -> None:
    with served(engine, tokenizer) as endpoint, served(engine, tokenizer) as elsewhere:
        show(window, endpoint)
        tried = {
            "markup": "document.body.innerHTML = '<img src=x onerror=window.hacked=1>'",
            "handler": "document.body.setAttribute('onclick', 'window.hacked=1')",
            "script": "document.createElement('script').text = 'window.hacked=1'",
        }
        for name, script in tried.items():
            failed = window.run(
                f"(() => {{ try {{ {script}; return ''; }} catch (error) {{ return error.name; }} }})()"
            )
            assert failed == "TypeError", name
        sent = "fetch(arguments[0]).then(() => 'sent', error => error.name)"
        assert window.run(sent, f"{elsewhere}/health") == "TypeError"
        assert window.run(sent, f"{endpoint}/health") == "sent"
        assert window.run("typeof window.hacked") == "undefined"


def test_a_tenant_enters_a_key_and_sees_its_own(
    window: Browser, engine: CachedEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path, keys = tmp_path / "tenants", {"alice": "alice's key", "operator": "the operator's key"}
    digests: dict[str, Any] = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    path.write_text(f"alice {digests['alice']}\noperator {digests['operator']} admin\n")
    path.chmod(0o600)
    with served(engine, tokenizer, api_keys=str(path)) as endpoint:
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        headers = {"Authorization": f"Bearer {keys['alice']}"}
        assert httpx.post(f"{endpoint}/v1/completions", json=ask, headers=headers).status_code == 200
        engine.put("Alice asks" + _FILLER, salt=engine.requests[0].cache_salt)

        def enter(key: str) -> None:
            window.until("!document.querySelector('#key-form').hidden")
            window.run("document.querySelector('#key').focus()")
            window.press(*key, "Enter")

        window.open(f"{endpoint}/ui", width=1280)
        enter("nobody's")
        window.until("document.querySelector('#key-note').textContent === 'This key is not valid.'")
        enter(keys["alice"])
        window.until("document.querySelector('#map button') !== null")
        crumbs = "[...document.querySelectorAll('#crumbs button')].map(button => button.textContent)"
        assert window.run(crumbs) == ["all", "alice"]  # a single tenant is opened
        assert [label[:10] for label in labels(window)] == ["Alice asks"]
        assert window.run("document.querySelector('#streams-card').hidden && !document.querySelector('#note').hidden")
        window.run("document.querySelector('#key-change').click()")
        enter(keys["operator"])
        window.until("document.querySelectorAll('#map button').length === 3")
        assert any(label.startswith("alice,") for label in labels(window))
        window.until("!document.querySelector('#streams-card').hidden")
        engine.delay_s = 0.05
        with streaming(endpoint, engine, count=1, key=keys["alice"]) as ids:
            window.until("document.querySelectorAll('#live tbody tr').length === 1")
            assert window.run(_ROWS)[0][:2] == [ids[0], "alice"]
        assert (
            "key" not in window.run("location.href") and window.run("sessionStorage.length + localStorage.length") == 0
        )
        assert window.run("document.cookie") == ""
        urls = window.run("performance.getEntriesByType('resource').map(entry => decodeURIComponent(entry.name))")
        assert not any(key in url for key in keys.values() for url in urls)

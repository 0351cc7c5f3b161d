"""A headless Chromium, driven over the WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver; scripts/lab_tools --all installs them"
)
KEYS = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Tab": "\ue004",
    "ArrowRight": "\ue014",
    "ArrowDown": "\ue015",
    "End": "\ue010",
}
_WITHIN_S = 60.0


class Browser:
    """A browser with one window."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def command(self, path: str, **body: Any) -> Any:
        """Send a command of the protocol."""
        answer = self._session.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def devtools(self, name: str, **parameters: Any) -> Any:
        """Send a command of Chromium's own."""
        return self.command("goog/cdp/execute", cmd=name, params=parameters)

    def open(self, url: str, *, width: int, is_dark: bool = False) -> None:
        """Load a page in a window of that width, in CSS pixels."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.devtools("Emulation.setFocusEmulationEnabled", enabled=True)
        self.command("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression, over `arguments`."""
        return self.command("execute/sync", script=f"return ({script});", args=arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + _WITHIN_S
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)
        return found

    def press(self, *keys: str) -> None:
        """Press and release keys, by their name or character, on what has the focus."""
        typed = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": key} for key in typed for kind in ("keyDown", "keyUp")]
        self.command("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def log(self) -> list[str]:
        """What the page wrote to the console since the last call, violations of its policy included."""
        return [entry["message"] for entry in self.command("se/log", type="browser")]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it."""
    assert CHROMIUM is not None and DRIVER is not None, "see needs_browser"
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ]
    options = {"binary": CHROMIUM, "args": arguments}
    wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        port = next(line.rstrip(".\n").rpartition(" ")[2] for line in driver.stdout if "successfully on port" in line)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/session/", timeout=120) as client:
            answer = client.post(f"http://127.0.0.1:{port}/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert answer.status_code == 200, answer.text
            client.base_url = client.base_url.join(f"{answer.json()['value']['sessionId']}/")
            try:
                yield Browser(client)
            finally:
                client.delete(str(client.base_url).rstrip("/"))
    finally:
        driver.terminate()
        driver.wait(30)

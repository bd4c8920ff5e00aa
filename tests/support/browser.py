"""A headless Chromium that tests drive over the DevTools protocol, through two pipes (docs/decisions/0047).

A message is JSON that ends with a zero byte; the browser reads them from its descriptor 3 and writes to 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60


def executable() -> str | None:
    """The browser's program, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page. `events` keeps what the browser told since the tab was made, oldest first."""

    def __init__(self, browser: Browser):
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is awaited. RuntimeError with what it throws."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if problem := done.get("exceptionDetails"):
            raise RuntimeError(problem.get("exception", {}).get("description", problem["text"]))
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Returns when the expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def size(self, width: int, height: int, scale: float = 1, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def media(self, **features: str) -> None:
        """E.g. prefers_color_scheme="dark"."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def key(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """kind: Pressed, Moved or Released."""
        held = {"button": "left", "buttons": 0 if kind == "Released" else 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **held)

    def click(self, selector: str) -> None:
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.mouse("Pressed", x, y)
        self.mouse("Released", x, y)

    @property
    def events(self) -> list[dict[str, Any]]:
        self.value("0")  # what was told before this answer has been read with it
        return [event for event in self.browser.events if event.get("sessionId") == self.session]


class Browser:
    """One browser process; a call waits for its answer."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int):
        self.process, self.to_browser, self.from_browser = process, to_browser, from_browser
        self.events: list[dict[str, Any]] = []
        self.number = 0
        self.rest = b""

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """RuntimeError with the browser's words where it refuses; TimeoutError where it does not answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        os.write(self.to_browser, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") != self.number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            if not select.select([self.from_browser], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"the browser says nothing for {TIMEOUT_S} s")
            some = os.read(self.from_browser, 1 << 20)
            if not some:
                raise RuntimeError(f"the browser ended with {self.process.wait()}")
            self.rest += some
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def running() -> Iterator[Browser]:
    """A browser with a profile of its own that is gone at the end."""
    program = executable()
    assert program, "no chromium"
    read_commands, to_browser = os.pipe()
    from_browser, write_answers = os.pipe()
    # The shell puts the pipes where the browser looks for them, whatever numbers they have here.
    wiring = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        flags += ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars"]
        flags += ["--no-sandbox"] * (os.geteuid() == 0)  # as root there is no other way
        process = subprocess.Popen(
            ["bash", "-c", wiring, program, *flags],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Browser(process, to_browser, from_browser)
        finally:
            os.close(to_browser)
            os.close(from_browser)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

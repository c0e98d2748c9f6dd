"""Drive a headless Chromium over its DevTools protocol: open a page, evaluate JavaScript, press keys, take pictures.

Chromium reads and writes the messages on two pipes (--remote-debugging-pipe), so no port and no package is needed.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = "chromium", "chromium-browser", "google-chrome"
LIMIT = 60  # seconds for one answer
ALT, CONTROL, META, SHIFT = 1, 2, 4, 8  # modifiers of press()
KEY_CODES = {
    "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37,
    "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip
# Chromium reads messages from file descriptor 3 and writes to 4. This program gives the two pipes these numbers.
START = """
import os, sys
pipes = [os.dup(int(word)) for word in sys.argv[1:3]]
for pipe, number in zip(pipes, (3, 4)):
    os.dup2(pipe, number)
    os.set_inheritable(number, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-smooth-scrolling",  # otherwise a key scrolls for some frames after it was pressed
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


class BrowserError(Exception):
    """There is no browser, or it does not answer."""


def find_browser():
    """The path of a Chromium; raises BrowserError if there is none."""
    found = [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        raise BrowserError(f"no browser was found ({', '.join(NAMES)}): on Debian and Ubuntu, apt install chromium")
    return found[0]


class Browser:
    """A running browser with one page. Use it as a context manager.

    events: all events of the page, [(method, parameters)]. errors(), requests() select those that a test checks.
    """

    def __init__(self):
        self.path = path = find_browser()
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, self.write), (self.read, write) = os.pipe(), os.pipe()
        flags = [*FLAGS, f"--user-data-dir={self.profile.name}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(read), str(write), path, *flags, "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(read, write),
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self.number, self.session, self.buffer, self.events = 0, None, b"", []

    def __enter__(self):
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read)
        os.close(self.write)
        self.profile.cleanup()

    # -- messages ------------------------------------------------------------------------------------------------------

    def call(self, method, **parameters):
        """The result of a method of the DevTools protocol; raises BrowserError."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        try:
            os.write(self.write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError(f"{self.path} has ended: start it with --headless to see why") from None
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def receive(self):
        """The next message; an event is also added to `events`."""
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise BrowserError(f"the browser did not answer within {LIMIT} s")
            piece = os.read(self.read, 1 << 16)
            if not piece:
                raise BrowserError(f"{self.path} has ended: start it with --headless to see why")
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    # -- the page ------------------------------------------------------------------------------------------------------

    def open(self, url, width=1280, height=900, dark=False):
        """Open a page in a window of this size, and wait until it is loaded."""
        self.resize(width, height)
        self.theme(dark)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self.receive()

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def theme(self, dark):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression):
        """The value of a JavaScript expression as JSON data; raises BrowserError with the text of an exception."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def press(self, key, modifiers=0, repeat=False):
        """Press and release a key, for example "ArrowRight". modifiers: a sum of ALT, CONTROL, META and SHIFT."""
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        code = KEY_CODES.get(key) or ord(key.upper())
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        typed = {"text": text, "autoRepeat": repeat} if text and not modifiers & ~SHIFT else {"autoRepeat": repeat}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", modifiers=modifiers, **common,
                  **typed)  # fmt: skip
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **common)

    def click(self, selector):
        """Click on the centre of the first element that matches a CSS selector; it must be in the window."""
        box = self.evaluate(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def errors(self):
        """The texts of errors in the console and of exceptions that were not caught."""
        found = []
        for method, event in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(event["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
                found.append(event["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
                found.append(str(event["args"]))
        return found

    def requests(self):
        """The addresses that the page has requested, without data that the page itself contains."""
        addresses = [event["request"]["url"] for method, event in self.events if method == "Network.requestWillBeSent"]
        return [address for address in addresses if not address.startswith("data:")]

    def screenshot(self, path, whole=False):
        """Write a PNG file of the window, or of the whole page."""
        options = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        image = self.call("Page.captureScreenshot", format="png", **options)
        with open(path, "wb") as file:
            file.write(base64.b64decode(image["data"]))

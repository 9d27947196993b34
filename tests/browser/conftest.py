"""One JupyterLab and one Chromium for all browser tests; a browser tab and a kernel for each test.

Both end with this folder: playwright keeps an event loop running, and later tests need their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import nbformat
import pytest

from tests.browser.explored import SET_UP

REPOSITORY = pathlib.Path(__file__).parents[2]
# A kernel before ipykernel 7.4.0 may never read one of its first requests (ipykernel issue 1554).
UNANSWERED_MS = 20_000
PACKAGES = "ipywidgets", "pandas", "plotly.graph_objects", "torch._dynamo"
"""What a kernel imports when it starts, without leaving a name. Fake tensors need `torch._dynamo`."""


def need(condition: bool, reason: str) -> None:
    """Skip the test if a program is not installed; fail in continuous integration."""
    if not condition:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def python_path(*folders: pathlib.Path) -> str:
    """A PYTHONPATH with these folders before those that it has."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclasses.dataclass(frozen=True)
class Lab:
    """A running JupyterLab."""

    url: str
    token: str
    root: pathlib.Path
    kernels: pathlib.Path
    """Folder for kernel specifications, which may be added while the server runs."""
    settings: pathlib.Path
    """Folder of the user's settings."""

    def end_kernel(self, notebook: str) -> None:
        """Shut down the kernel of a notebook, if it has one."""
        with self._request("GET", "sessions") as answer:
            sessions = json.load(answer)
        for session in sessions:
            if session["path"] == notebook:
                self._request("DELETE", f"sessions/{session['id']}").close()

    def start_kernel(self) -> str:
        """Start a kernel that no notebook has yet; return its number."""
        with self._request("POST", "kernels", {"name": "python3"}) as answer:
            return str(json.load(answer)["id"])

    def give_kernel(self, kernel: str, notebook: str) -> None:
        """Let a notebook use a kernel when it is opened."""
        session = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"id": kernel}}
        self._request("POST", "sessions", session).close()

    def _request(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method, headers=headers, data=body)
        return urllib.request.urlopen(request, timeout=60)


class Kernels:
    """A kernel for each notebook: the next one starts while a test runs, and the one before ends meanwhile."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._next: str | None = None
        self._thread = ThreadPoolExecutor(1)
        self._ending: list[Future[None]] = []

    def prepare(self) -> None:
        """Start the kernel of the next notebook."""
        if self._next is None:
            self._next = self._lab.start_kernel()

    def give(self, notebook: str) -> None:
        """Let a notebook use the kernel that was started for it."""
        self.prepare()
        assert self._next is not None
        self._lab.give_kernel(self._next, notebook)
        self._next = None

    def end(self, notebook: str) -> None:
        """Shut down the kernel of a notebook without waiting for its end."""
        self._ending.append(self._thread.submit(self._lab.end_kernel, notebook))

    def close(self) -> None:
        """Wait for the kernels that end, and raise their errors; the server ends the one for the next notebook."""
        self._thread.shutdown()
        for ending in self._ending:
            ending.result()


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab in folders of its own, with this checkout importable in its kernels."""
    base = tmp_path_factory.mktemp("lab")
    environment = dict(os.environ, HOME=str(base), PYTHONPATH=python_path(REPOSITORY))
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        environment[f"JUPYTER_{name}"] = str(base / name.lower())
    for name in ("SETTINGS_DIR", "WORKSPACES_DIR"):
        environment[f"JUPYTERLAB_{name}"] = str(base / name.lower())
    environment |= {"IPYTHONDIR": str(base / "ipython"), "JUPYTER_PATH": str(base / "share")}
    # The question whether to fetch news covers the notebook until it is answered.
    settings = base / "settings_dir" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    (base / "root").mkdir()
    startup = base / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "packages.py").write_text(f"[__import__(name) for name in {PACKAGES}]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--LabApp.expose_app_in_browser=True"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--ServerApp.root_dir={base / 'root'}", f"--IdentityProvider.token={token}"]
    log = base / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
        else:
            pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
        yield Lab(url, token, base / "root", base / "share" / "kernels", base / "settings_dir")
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="package")
def kernels(lab: Lab) -> Iterator[Kernels]:
    """The kernels of the notebooks."""
    kernels = Kernels(lab)
    yield kernels
    kernels.close()


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """A headless Chromium."""
    path = os.environ.get("MEMEXPLORE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    need(path is not None, "no chromium on this machine: install it, or name it in MEMEXPLORE_CHROMIUM")
    playwright = pytest.importorskip("playwright.sync_api")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    arguments += ["--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def old_kernel(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The name of a kernel with an older ipykernel, installed over the packages of this environment."""

    def install(version: str) -> str:
        name = f"ipykernel-{version}"
        if (lab.kernels / name).exists():
            return name
        packages = tmp_path_factory.mktemp(name)
        # Only these two differ: all other packages come from this environment.
        wanted = [f"ipykernel=={version}", "nest-asyncio>=1.4"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), "--no-deps", *wanted]
        uv = ["uv", "pip", "install", "--quiet", "--python", sys.executable, "--target", str(packages), "--no-deps"]
        has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0
        installed = subprocess.run(pip if has_pip else [*uv, *wanted], capture_output=True, text=True)
        need(installed.returncode == 0, f"ipykernel {version} cannot be installed: {installed.stderr[-500:]}")
        specification = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "env": {"PYTHONPATH": python_path(packages, REPOSITORY)},
        }
        (lab.kernels / name).mkdir(parents=True)
        (lab.kernels / name / "kernel.json").write_text(json.dumps(specification))
        return name

    return install


class Notebook:
    """One notebook, open in its own browser tab."""

    CURRENT = "const app = window.jupyterapp, panel = app.shell.currentWidget;"
    READY = f"""() => {{ {CURRENT.replace("app.", "app?.")}
        return panel?.context?.isReady && panel.sessionContext.session?.kernel?.status === 'idle' }}"""
    OPEN = f"() => {{ {CURRENT.replace('app.', 'app?.')} return panel?.context?.isReady }}"

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name

    def open(self) -> Notebook:
        """Load the page and wait for the kernel."""
        self.page.goto(f"{self.lab.url}/lab/tree/{self.name}?token={self.lab.token}&reset")
        self.page.wait_for_function(self.READY, timeout=60_000)
        return self

    def open_with_old_kernel(self) -> Notebook:
        """Load the page and wait for an old kernel; start another one if the first does not answer."""
        self.open_without_kernel()
        is_answered = self.page.evaluate(
            f"""timeout => {{
                const ready = {self.READY}, sleep = milliseconds => new Promise(done => setTimeout(done, milliseconds));
                const ask = async () => {{
                    while (!ready()) await sleep(100);
                    {self.CURRENT}
                    await panel.sessionContext.session.kernel.requestExecute({{ code: '1' }}).done;
                    return true;
                }};
                return Promise.race([ask(), sleep(timeout).then(() => false)]) }}""",
            UNANSWERED_MS,
        )
        if not is_answered:
            self.lab.end_kernel(self.name)
            self.open()
        return self

    def open_without_kernel(self) -> Notebook:
        """Load the page again without waiting for a kernel."""
        self.page.goto(f"{self.lab.url}/lab/tree/{self.name}?token={self.lab.token}&reset")
        self.page.wait_for_function(self.OPEN, timeout=60_000)
        return self

    def start(self, number: int) -> None:
        """Start one cell without waiting for its end."""
        self.page.evaluate(
            f"""number => {{ {self.CURRENT}
                panel.content.activeCellIndex = number; app.commands.execute('notebook:run-cell') }}""",
            number,
        )

    def run(self, number: int) -> None:
        """Run one cell and wait for its end."""
        self.start(number)
        self.wait(number)

    def run_all(self) -> None:
        """Run all cells and wait for the last one."""
        kinds = self.page.evaluate(f"() => {{ {self.CURRENT} return panel.content.widgets.map(c => c.model.type) }}")
        self.page.evaluate(f"() => {{ {self.CURRENT} app.commands.execute('notebook:run-all-cells') }}")
        for number, kind in enumerate(kinds):
            if kind == "code":
                self.wait(number)

    def wait(self, number: int, timeout: float = 120_000) -> None:
        """Wait until a cell has run."""
        self.page.wait_for_function(
            f"""number => {{ {self.CURRENT} const model = panel.content.widgets[number].model;
                return model.executionState === 'idle' && model.executionCount !== null }}""",
            arg=number,
            timeout=timeout,
        )

    def sources(self) -> list[str]:
        """The text of each code cell."""
        return self.page.evaluate(
            f"""() => {{ {self.CURRENT} return panel.content.widgets.filter(c => c.model.type === 'code')
                .map(c => c.model.sharedModel.getSource()) }}"""
        )

    def outputs(self, number: int) -> list[dict[str, Any]]:
        """The outputs of a cell as the notebook would save them."""
        return self.page.evaluate(
            f"number => {{ {self.CURRENT} return panel.content.widgets[number].model.outputs.toJSON() }}", number
        )

    def text(self, number: int) -> str:
        """Return the printed output of a cell."""
        return "".join("".join(output.get("text", "")) for output in self.outputs(number))

    def errors(self) -> list[str]:
        """The exceptions in all cells."""
        outputs = self.page.evaluate(
            f"() => {{ {self.CURRENT} return panel.content.widgets.flatMap(c => c.model.outputs?.toJSON() ?? []) }}"
        )
        return [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]

    def save(self) -> None:
        """Write the notebook to its file."""
        self.page.evaluate(f"() => {{ {self.CURRENT} return panel.context.save() }}")

    def state(self, number: int) -> str:
        """Whether a cell is `running` or `idle`."""
        return self.page.evaluate(
            f"number => {{ {self.CURRENT} return panel.content.widgets[number].model.executionState }}", number
        )

    def interrupt(self) -> None:
        """Interrupt the kernel, as the stop button does."""
        self.page.evaluate(f"() => {{ {self.CURRENT} return panel.sessionContext.session.kernel.interrupt() }}")

    def settle(self) -> None:
        """Wait until no view on the page is busy."""
        # `wait_for_function` takes the promise of an async function for true.
        self.page.evaluate(
            """async () => {
                const busy = () => document.querySelector('.memexplore[aria-busy=true]');
                const end = Date.now() + 60_000;
                for (let quiet = 0; quiet < 5; quiet = busy() ? 0 : quiet + 1) {
                    if (Date.now() > end) throw new Error('a view is still busy');
                    await new Promise(done => setTimeout(() => requestAnimationFrame(done), 40));
                } }"""
        )

    def shut_down(self) -> None:
        """Leave the page, then end the kernel.

        A kernel that exits may interleave the parts of two messages, because its threads write to the socket without
        its output thread: JupyterLab then throws "Kernel message validation error" about `stream.stderr`.
        """
        self.page.goto("about:blank")
        self.lab.end_kernel(self.name)


_LATE = "[anywidget] Failed to initialize model."
"""anywidget 0.11 reports a model that took more than 2 s, as one in a background page does while another page loads on
a slow machine. A test waits for what its page shows, so a view that never comes fails it all the same."""


@pytest.fixture
def notebook(
    lab: Lab, kernels: Kernels, chromium: Any, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Notebook]]:
    """A function that opens a notebook of the given cells, or a copy of a notebook file, in its own browser tab."""
    # JupyterLab keeps the theme that an earlier test has chosen.
    (lab.settings / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings").unlink(missing_ok=True)
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)) if str(error) != _LATE else None)
    opened: list[Notebook] = []

    def make(*cells: str, file: pathlib.Path | None = None, kernel: str = "python3") -> Notebook:
        document = nbformat.v4.new_notebook() if file is None else nbformat.read(file, as_version=4)
        document.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
        document.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
        name = f"{request.node.originalname}-{secrets.token_hex(3)}.ipynb"
        nbformat.write(document, lab.root / name)
        opened.append(Notebook(page, lab, name))
        if kernel != "python3":
            return opened[-1].open_with_old_kernel()
        kernels.give(name)
        opened[-1].open()
        kernels.prepare()
        return opened[-1]

    yield make
    context.close()
    for book in opened:
        kernels.end(book.name)
    assert not problems, problems


@pytest.fixture
def explored(notebook: Callable[..., Any]) -> Any:
    """A notebook that shows an explorer, and a cell that resets its knobs."""
    book = notebook(SET_UP, "explorer", "explorer.knobs = mx.Knobs()", "print(explorer.knobs)")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    return book
